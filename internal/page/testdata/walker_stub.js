(()=>{ if(globalThis.abf) return globalThis.abf;
const hs=new Map(); let hn=0, rn=0, prefix=null; const refs=new Map();
const err=(code,message)=>({error:{code,message}});
const find=(t)=>{ let m;
 if(/^h\d+$/.test(t)) return hs.get(t)||err('stale_ref','gone');
 if(/^(f\d+)?e\d+$/.test(t)){ const e=refs.get(t); return e&&e.isConnected?e:err('stale_ref','gone'); }
 if(m=/^text=(.*)$/.exec(t)){ const a=[...document.querySelectorAll('body *')].filter(e=>e.textContent.includes(m[1])); return a.length?a[a.length-1]:err('not_found','x'); }
 try { const l=document.querySelectorAll(t); if(!l.length) return err('not_found','no match'); if(l.length>1) return err('ambiguous',l.length+' elements match'); return l[0]; } catch(e){ return err('bad_selector',e.message); } };
const desc=(e)=>{ let h; for(const [k,v] of hs) if(v===e) h=k; if(!h){h='h'+ ++hn; hs.set(h,e);} let ref=''; for(const [k,v] of refs) if(v===e) ref=k;
 return {handle:h,ref,role:e.tagName.toLowerCase(),name:(e.textContent||'').trim().slice(0,50),locator:"locator('"+(e.id?'#'+e.id:e.tagName.toLowerCase())+"')"}; };
const raf=()=>new Promise(r=>{ const t=setTimeout(r,100); requestAnimationFrame(()=>{clearTimeout(t);r()}); });
const probe=async(t,o)=>{ const e=find(t); if(e.error) return e; e.scrollIntoView({block:'nearest',inline:'nearest',behavior:'instant'});
 const a=e.getBoundingClientRect(); await raf(); const b=e.getBoundingClientRect();
 if(!b.width||!b.height) return err('not_visible','not visible');
 if(!o.force&&(a.x!==b.x||a.y!==b.y)) return err('not_stable','moving');
 if(e.disabled) return err('disabled','is disabled');
 const x=b.x+b.width/2,y=b.y+b.height/2; if(x<0||y<0||x>innerWidth||y>innerHeight) return err('outside_viewport','outside');
 if(!o.force){const h=document.elementFromPoint(x,y); if(!(h&&(e===h||e.contains(h)||h.contains(e)&&0))) return err('obstructed',(h?h.tagName.toLowerCase():'nothing')+' receives the press');}
 return {x,y,...desc(e)}; };
const until=async(f,ms)=>{ const end=performance.now()+ms; for(;;){ const r=await f(); if(!r.error||['not_found','ambiguous','stale_ref','bad_selector'].includes(r.error.code)||performance.now()>end) return r; await raf(); } };
const ws=new Map(); let wn=0;
const abf={ element:t=>{const e=find(t); return e.error?null:e}, resolve:t=>{ let m; if(m=/^locator\('([^']+)'\)\.contentFrame\(\)\.locator\('([^']+)'\)$/.exec(t)){const e=find(m[1]); return e.error?e:{frame:{handle:desc(e).handle,locator:"locator('"+m[1]+"')",rest:m[2]}}} const e=find(t); return e.error?e:desc(e)},
 describe:t=>abf.resolve(t), describeElement:desc,
 point:(t,o={})=>until(()=>probe(t,o),o.timeout||5000),
 frameOffset:(t,p)=>{const e=find(t); if(e.error) return e; e.scrollIntoView({block:'nearest',behavior:'instant'}); const b=e.getBoundingClientRect(); const x=b.x+e.clientLeft+p.x,y=b.y+e.clientTop+p.y; if(document.elementFromPoint(x,y)!==e) return err('obstructed','covered'); return {x,y}},
 rect:async(t,o)=>{const e=find(t); if(e.error) return e; e.scrollIntoView({block:'nearest',behavior:'instant'}); const b=e.getBoundingClientRect(); return {x:b.x,y:b.y,width:b.width,height:b.height,...desc(e)}},
 prepareFill:async(t,x)=>{const e=find(t); if(e.error) return e; if(e.disabled) return err('disabled','is disabled'); if(e.readOnly) return err('readonly','is readonly'); e.focus(); if(e.select) e.select(); else getSelection().selectAllChildren(e); return {kind:'insert',...desc(e)}},
 prepareType:async(t)=>{const e=find(t); if(e.error) return e; e.focus(); return {kind:'insert',...desc(e)}},
 waitForText:(x,o)=>new Promise(r=>{ const has=()=>document.body&&document.body.innerText.includes(x)!==!!o.gone; if(has()) return r({met:true}); const mo=new MutationObserver(()=>{if(has()){mo.disconnect();r({met:true})}}); mo.observe(document,{subtree:true,childList:true,characterData:true,attributes:true}); setTimeout(()=>{mo.disconnect();r({met:false})},o.timeout) }),
 frames:async(n=2,ms=250)=>{let ok=true; await Promise.race([(async()=>{for(let i=0;i<n;i++) await new Promise(r=>requestAnimationFrame(r))})(),new Promise(r=>setTimeout(()=>{ok=false;r()},ms))]); return {painted:ok}},
 watch:()=>{const id=++wn; const w={c:false}; w.mo=new MutationObserver(()=>w.c=true); w.mo.observe(document,{subtree:true,childList:true,characterData:true,attributes:true}); ws.set(id,w); return id},
 changed:id=>{const w=ws.get(id); if(w.mo.takeRecords().length) w.c=true; w.mo.disconnect(); ws.delete(id); return w.c},
 page:()=>({url:location.href,title:document.title,dpr:devicePixelRatio}),
 snapshot:(o={})=>{ if(prefix===null) prefix=o.prefix||''; const lines=[],frames=[]; let root=document.body; if(o.target){root=find(o.target); if(root.error) return root}
  const walk=(e,d)=>{ const ref=prefix+'e'+(++rn); refs.set(ref,e); const kids=[...e.children]; let l='  '.repeat(d)+'- '+e.tagName.toLowerCase()+' [ref='+ref+']'; if(e.tagName==='IFRAME'){frames.push({line:lines.length,handle:desc(e).handle,indent:d*2,depth:d}); lines.push(l); return} if(!kids.length&&e.textContent) l+=': '+e.textContent.trim(); else if(kids.length) l+=':'; lines.push(l); for(const k of kids) if(!/SCRIPT|STYLE/.test(k.tagName)) walk(k,d+1)};
  if(root) walk(root,0); return {text:lines.join('\n'),lines:lines.length,frames,cut:null}},
};
return globalThis.abf=abf })()
