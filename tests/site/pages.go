package site

// elementsPerRow is how many elements a row of /elements has, itself included.
const elementsPerRow = 5

// page is one that shows the same to everybody.
type page struct{ path, name, title string }

var pages = []page{
	{"/form", "form", "Form"},
	{"/long", "long", "Long page"},
	{"/elements", "elements", "Elements"},
	{"/frames", "frames", "Frames"},
	{"/frame", "frame", "Frame"},
	{"/shadow", "shadow", "Shadow roots"},
	{"/dialog", "dialog", "Dialogs"},
	{"/popup", "popup", "Popups"},
	{"/download", "download", "Downloads"},
	{"/counter", "counter", "Counter"},
	{"/todo", "todo", "Todo"},
	{"/console", "console", "Console"},
	{"/fetch", "fetch", "Fetch"},
	{"/history", "history", "History"},
	{"/webdriver", "webdriver", "Webdriver"},
}

const markup = `
{{define "head"}}<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{{.Title}}</title><link rel="icon" href="data:,">
<style>body { font: 16px sans-serif; margin: 24px; } label { display: block; margin: 8px 0; }</style></head>
<body>
{{end}}

{{define "foot"}}</body></html>
{{end}}

{{define "index"}}{{template "head" .}}
<h1>Test site</h1>
<nav aria-label="Pages"><ul>
<li><a href="/login">Sign in</a></li>
<li><a href="/account">Account</a></li>
<li><a href="/form">Form</a></li>
<li><a href="/long?n=200">Long page</a></li>
<li><a href="/elements?n=100">Elements</a></li>
<li><a href="/frames">Frames</a></li>
<li><a href="/shadow">Shadow roots</a></li>
<li><a href="/dialog">Dialogs</a></li>
<li><a href="/popup">Popups</a></li>
<li><a href="/download">Downloads</a></li>
<li><a href="/slow?ms=1000">Slow page</a></li>
<li><a href="/broken">Broken page</a></li>
<li><a href="/redirect">Redirect to the form</a></li>
<li><a href="/counter">Counter</a></li>
<li><a href="/todo">Todo</a></li>
<li><a href="/console">Console</a></li>
<li><a href="/fetch">Fetch</a></li>
<li><a href="/history">History</a></li>
<li><a href="/webdriver">Webdriver</a></li>
</ul></nav>
{{template "foot"}}{{end}}

{{define "login"}}{{template "head" .}}{{with .Data}}
<style>
h1 { position: absolute; left: 40px; top: 20px; margin: 0; }
#message { position: absolute; left: 40px; top: 66px; margin: 0; color: #a00000; }
form input, form button { position: absolute; box-sizing: border-box; border: 2px solid #404040; font: 32px sans-serif; padding: 0 12px; }
form button { color: white; }
</style>
<h1>Sign in</h1>
<p id="message" role="alert">{{.Message}}</p>
<form method="post" action="/login" autocomplete="off">
<input name="user" aria-label="User" placeholder="User" autocomplete="off" style="{{css .User}}">
<input name="pass" type="password" aria-label="Password" placeholder="Password" autocomplete="off" style="{{css .Password}}">
<button style="{{css .Send}}">Sign in</button>
</form>
{{end}}{{template "foot"}}{{end}}

{{define "account"}}{{template "head" .}}{{with .Data}}
<h1>{{if .User}}Signed in as {{.User}}{{else}}Not signed in{{end}}</h1>
<ul>
<li>persistent cookie: {{.Persistent}}</li>
<li>session cookie: {{.Session}}</li>
<li>localStorage: <span id="local">reading</span></li>
<li>IndexedDB: <span id="database">reading</span></li>
</ul>
<p role="status" id="status">Storage is being read</p>
{{if .User}}<form method="post" action="/logout"><button>Sign out</button></form>{{else}}<a href="/login">Sign in</a>{{end}}
<script>
(async () => {
	const show = (id, text) => { document.getElementById(id).textContent = text; };
	const done = (request) => new Promise((resolve, reject) => {
		request.onsuccess = () => resolve(request.result);
		request.onerror = () => reject(request.error);
	});
	try {
		const opening = indexedDB.open({{.Database}}, 1);
		opening.onupgradeneeded = () => opening.result.createObjectStore("login");
		const database = await done(opening);
		// A fresh login carries what to store; the address forgets it at once.
		const value = new URLSearchParams(location.search).get("store");
		if (value !== null) {
			localStorage.setItem({{.StorageKey}}, value);
			const writing = database.transaction("login", "readwrite", { durability: "strict" });
			writing.objectStore("login").put(value, "value");
			await new Promise((resolve, reject) => { writing.oncomplete = resolve; writing.onerror = () => reject(writing.error); });
			history.replaceState(null, "", "/account");
		}
		const stored = await done(database.transaction("login").objectStore("login").get("value"));
		show("local", localStorage.getItem({{.StorageKey}}) ?? "none");
		show("database", stored ?? "none");
		show("status", "Storage was read");
	} catch (error) {
		show("status", "Storage failed: " + error);
	}
})();
</script>
{{end}}{{template "foot"}}{{end}}

{{define "form"}}{{template "head" .}}
<h1>Form</h1>
<form method="post" action="/form" enctype="multipart/form-data">
<label>Name <input name="name" required></label>
<label>Colour <select name="color"><option value="red">Red</option><option value="green">Green</option><option value="blue">Blue</option></select></label>
<fieldset><legend>Size</legend>
<label><input type="radio" name="size" value="small" checked> Small</label>
<label><input type="radio" name="size" value="large"> Large</label>
</fieldset>
<label><input type="checkbox" name="agree" value="yes"> I agree</label>
<label>Notes <textarea name="notes"></textarea></label>
<label>File <input type="file" name="file"></label>
<button>Send</button> <button type="button" disabled>Not yet</button>
</form>
<p>Last key: <output id="key">none</output></p>
<script>document.addEventListener("keydown", (e) => { document.getElementById("key").textContent = e.key; });</script>
{{template "foot"}}{{end}}

{{define "posted"}}{{template "head" .}}
<h1>Form received</h1>
<dl>{{range .Data}}<dt>{{.Name}}</dt><dd>{{.Value}}</dd>{{end}}</dl>
<a href="/form">Again</a>
{{template "foot"}}{{end}}

{{define "long"}}{{template "head" .}}
<h1>Long page</h1>
{{range .Data.N}}<p>Paragraph {{.}}: a line of text that makes the page long.</p>
{{end}}<button onclick="document.title = 'Bottom clicked'">At the bottom</button>
{{template "foot"}}{{end}}

{{define "elements"}}{{template "head" .}}
{{range .Data.N}}<div><span>Row {{.}}</span> <a href="#row{{.}}">Link {{.}}</a> <button>Button {{.}}</button> <input aria-label="Field {{.}}"></div>
{{end}}{{template "foot"}}{{end}}

{{define "frames"}}{{template "head" .}}
<h1>Frames</h1>
<iframe name="same" title="Same site" src="/frame?name=same" width="600" height="160"></iframe>
{{with .Data.Other}}<iframe name="other" title="Other site" src="http://{{.}}/frame?name=other" width="600" height="160"></iframe>{{end}}
<iframe name="inline" title="Inline" srcdoc="&lt;button&gt;Inside srcdoc&lt;/button&gt;" width="600" height="80"></iframe>
{{template "foot"}}{{end}}

{{define "frame"}}{{template "head" .}}{{with .Data}}
<h2>Frame {{.Frame}} of {{.Host}}</h2>
<label>Text in {{.Frame}} <input></label>
<button onclick="this.textContent = 'Clicked in {{.Frame}}'">Click in {{.Frame}}</button>
{{end}}{{template "foot"}}{{end}}

{{define "shadow"}}{{template "head" .}}
<h1>Shadow roots</h1>
<test-open></test-open>
<test-closed></test-closed>
<test-slot><button>Slotted button</button></test-slot>
<script>
const define = (name, mode, markup) => customElements.define(name, class extends HTMLElement {
	constructor() { super(); this.attachShadow({ mode }).innerHTML = markup; }
});
define("test-inner", "open", "<button onclick=\"this.textContent = 'Inner clicked'\">Inner button</button>");
define("test-open", "open", "<p>In an open root</p><label>Open field <input></label><test-inner></test-inner>");
define("test-closed", "closed", "<button>Closed button</button>");
define("test-slot", "open", "<section aria-label='Slot'><slot></slot></section>");
</script>
{{template "foot"}}{{end}}

{{define "dialog"}}{{template "head" .}}
<h1>Dialogs</h1>
<button onclick="alert('An alert'); say('alert closed')">Alert</button>
<button onclick="say('confirm: ' + confirm('Really?'))">Confirm</button>
<button onclick="say('prompt: ' + prompt('Your name?', 'nobody'))">Prompt</button>
<button onclick="addEventListener('beforeunload', (e) => e.preventDefault()); say('guarded')">Guard leaving</button>
<button onclick="document.querySelector('dialog').showModal()">Open modal</button>
<dialog aria-label="Modal"><p>A modal of the page</p><form method="dialog"><button>Close modal</button></form></dialog>
<p>Result: <output id="result">none</output></p>
<script>function say(text) { document.getElementById("result").textContent = text; }</script>
{{template "foot"}}{{end}}

{{define "popup"}}{{template "head" .}}
<h1>Popups</h1>
<button onclick="window.open('/counter', 'popup', 'width=400,height=300')">Open popup</button>
<a href="/counter" target="_blank">Open in a new tab</a>
{{template "foot"}}{{end}}

{{define "download"}}{{template "head" .}}
<h1>Downloads</h1>
<a href="/download/file">Download report</a>
<a href="data:text/plain,inline" download="inline.txt">Download inline</a>
{{template "foot"}}{{end}}

{{define "counter"}}{{template "head" .}}
<h1>Counter</h1>
<p>Count: <output id="count">0</output></p>
<button onclick="add(1)">Increment</button> <button onclick="add(-1)">Decrement</button>
<script>
let count = 0;
function add(n) { count += n; document.getElementById("count").textContent = count; document.title = "Counter " + count; }
</script>
{{template "foot"}}{{end}}

{{define "todo"}}{{template "head" .}}
<h1>Todo</h1>
<form id="add"><label>New item <input name="item"></label><button>Add</button></form>
<ul aria-label="Items" id="items"></ul>
<p id="left"></p>
<script>
const items = JSON.parse(localStorage.getItem("todo") ?? "[]");
function draw() {
	localStorage.setItem("todo", JSON.stringify(items));
	const list = document.getElementById("items");
	list.replaceChildren(...items.map((item, i) => {
		const row = document.createElement("li"), label = document.createElement("label"), box = document.createElement("input"), remove = document.createElement("button");
		box.type = "checkbox";
		box.checked = item.done;
		box.onchange = () => { item.done = box.checked; draw(); };
		label.append(box, " " + item.text);
		remove.textContent = "Remove " + item.text;
		remove.onclick = () => { items.splice(i, 1); draw(); };
		row.append(label, remove);
		return row;
	}));
	document.getElementById("left").textContent = items.filter((item) => !item.done).length + " left";
}
document.getElementById("add").onsubmit = (e) => {
	e.preventDefault();
	const field = e.target.elements.item;
	if (field.value.trim()) items.push({ text: field.value.trim(), done: false });
	field.value = "";
	draw();
};
draw();
</script>
{{template "foot"}}{{end}}

{{define "console"}}{{template "head" .}}
<h1>Console</h1>
<button onclick="console.error('an error of the page')">Log an error</button>
<button onclick="console.warn('a warning of the page')">Log a warning</button>
<button onclick="console.log('a line of the page')">Log a line</button>
<button onclick="setTimeout(() => { throw new Error('thrown by the page'); })">Throw</button>
{{template "foot"}}{{end}}

{{define "fetch"}}{{template "head" .}}
<h1>Fetch</h1>
<button id="load">Load</button>
<p>Result: <output id="result">none</output></p>
<script>
document.getElementById("load").onclick = async () => {
	const answer = await (await fetch("/slow?as=json&ms=300")).json();
	document.getElementById("result").textContent = "waited " + answer.waited;
};
</script>
{{template "foot"}}{{end}}

{{define "history"}}{{template "head" .}}
<h1>History</h1>
<button id="next">Next view</button>
<p>View: <output id="view"></output></p>
<script>
const draw = () => { document.getElementById("view").textContent = history.state?.view ?? 0; };
document.getElementById("next").onclick = () => { history.pushState({ view: (history.state?.view ?? 0) + 1 }, "", "#view"); draw(); };
addEventListener("popstate", draw);
draw();
</script>
{{template "foot"}}{{end}}

{{define "webdriver"}}{{template "head" .}}
<h1>Webdriver</h1>
<p>navigator.webdriver of {{.Data.Host}}: <output id="driven"></output></p>
<button onclick="open('/webdriver', '_blank', 'width=300,height=200')">Popup of this site</button>
{{with .Data.Other}}<button onclick="open('http://{{.}}/webdriver', '_blank', 'width=300,height=200')">Popup of another site</button>{{end}}
<script>
document.getElementById("driven").textContent = navigator.webdriver;
if (parent !== window) parent.postMessage(location.hostname + " " + navigator.webdriver, "*");
</script>
{{template "foot"}}{{end}}

{{define "slow"}}{{template "head" .}}
<h1>Slow page</h1>
<p>Waited {{.Data}} ms</p>
{{template "foot"}}{{end}}

{{define "broken"}}{{template "head" .}}
<h1>Broken page</h1>
<p>The server failed on purpose.</p>
{{template "foot"}}{{end}}
`
