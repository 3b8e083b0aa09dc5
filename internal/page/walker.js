/*
 * walker.js: everything the page engine does inside a document.
 *
 * One expression. Evaluate it in an isolated world of every frame (worldName
 * "abf"; Page.addScriptToEvaluateOnNewDocument for new documents, plus a plain
 * Runtime.evaluate with the world's contextId where it has not run yet). Its
 * value is the object below, which it also keeps as `globalThis.abf` of that
 * world; evaluating it again in the same document returns the same object, with
 * refs and handles kept. The page can neither see nor replace it.
 *
 * Call it as `abf.point("e5", {timeout: 5000})` (Runtime.evaluate, contextId,
 * returnByValue, awaitPromise) or with callFunctionOn on the object. All
 * arguments and answers are plain JSON unless said otherwise; no function
 * throws for what a page or a caller can cause: it answers
 *     {error: {code, message, candidates?, receiver?}}
 * code is one of
 *     stale_ref        the ref is unknown here, its element left the document, or a later snapshot gave it another ref (it
 *                      had changed its role or name)
 *     not_found        a selector or locator matched nothing
 *     ambiguous        it matched several; candidates: [{ref, role, name, locator}] (first 10), message has the count
 *     bad_selector     the selector or locator expression cannot be parsed; message says where
 *     not_visible, not_stable, disabled, obstructed, outside_viewport, detached   from point and friends
 *     readonly, not_editable, bad_value                                            from prepareFill, selectOption
 * message is a cause without a capital or period ("<button> Save is disabled"), ready for fault.New.
 *
 * TARGET, wherever a function takes one, is a string:
 *     a ref            "e5", "f2e5": the document knows its own prefix (set by the first snapshot), another prefix is stale_ref
 *     a handle         "h12", as answered by an earlier call in the same document; valid as long as its element is in it
 *     a CSS selector   "#id", "div > a"; also "css=..."; open shadow roots are searched too
 *     a text selector  "text=Hi" (substring, case-insensitive), "text='Hi'" (exact), "text=/re/i"
 *     "role=button[name='x']", "xpath=//a" or "//a", "id=x", "data-testid=x"; ">>" chains, "nth=0", "visible=true"
 *     a locator        "getByRole('button', { name: 'x', exact: true })", getByText, getByLabel, getByPlaceholder,
 *                      getByTestId, getByAltText, getByTitle, locator('css', { hasText, has }), filter({...}), first(),
 *                      last(), nth(n), and(..), or(..), chained with "."; a leading "page." is dropped;
 *                      regular expressions as /re/i
 *     contentFrame() / frameLocator('css') in a chain leave the document: see resolve.
 * Refs and locators of child frames must be sent to that frame's world.
 *
 * snapshot({target?, depth?, boxes?, prefix?, maxBytes?})
 *     -> {text, lines, frames: [{line, ref, handle, indent, depth}], cut: null | {lines, bytes, within}}
 *     prefix    ref prefix of this document ("" or "f3"); kept from the first call on, a different later one is ignored
 *     depth     print levels 0..depth; absent = all
 *     maxBytes  cap on text in UTF-8 bytes, cut at a line end; 0 or absent = none. What was cut is counted in `cut`, and
 *               text ends with one comment line "# cut: ..." that says so (it counts as a line).
 *     frames    iframes that have a ref, in document order. To splice: split text at "\n"; lines[f.line] is "- iframe [ref=e3]"
 *               with f.indent spaces before it (no colon). If the child answers a non-empty text, append ":" to that line and
 *               insert the child's lines below it, each with f.indent + 2 more spaces. Work from the last frame to the first.
 *               Child depth = depth - f.depth - 1 (skip the child when negative). Give children the bytes that are left.
 *               f.handle -> element(f.handle) -> DOM.describeNode -> node.frameId is the child frame.
 *     With a target that is not found: {error}. A snapshot of a target never invalidates other refs.
 *
 * resolve(target, {strict = true}) -> {handle, ref, role, name, locator}
 *     ref is "" when the element has none. locator is Playwright code without "page.": generated for refs and handles,
 *     the caller's own expression ("locator('text=Hi')", or the expression as given) otherwise.
 *     strict false takes the first match instead of answering ambiguous.
 *     When the chain enters a frame: {frame: {handle, locator, rest}}; resolve `rest` in the frame that element(handle) owns,
 *     code is locator + ".contentFrame()." + the child's locator.
 * element(target) -> the Element itself or null (call with returnByValue: false; for DOM.describeNode, main-world evaluate)
 * describe(target) -> {handle, ref, role, name, locator} with a generated locator even for selectors
 * describeElement(el) -> the same for an Element argument (callFunctionOn with an objectId argument)
 *
 * point(target, {timeout = 5000, force = false, position?: {x, y}}) -> Promise of
 *     {x, y, handle, ref, role, name, locator, scrolled, rect: {x, y, width, height}} | {error}
 *     Waits until the element is visible, unmoved over two frames, enabled (fieldset, optgroup, inherited aria-disabled), inside
 *     the viewport after scrolling, and receives the press (hit test through open shadow roots; a label's press may land on its
 *     control and the other way round). x, y are CSS px of this frame's viewport. obstructed names the receiver:
 *     receiver: {role, name, tag, locator}. force skips the hit test and stability; never disabled or outside_viewport.
 *     The answer after the timeout is the last reason seen. The press should follow within one frame.
 * hit(target, x, y) -> {ok: true} | {error}      re-check right before a press, one cheap call
 * frameOffset(target, {x, y}) -> {x, y} | {error}
 *     target is an iframe of this document, x, y a point in its content; answers the point in this document's viewport, after
 *     scrolling the frame into view when needed and checking that the frame receives the press there. Call once per ancestor.
 * rect(target, {scroll = true}) -> Promise of {x, y, width, height, pageX, pageY, dpr, handle, ref, role, name, locator}
 *     viewport and document coordinates in CSS px, for screenshots
 *
 * prepareFill(target, text, {timeout = 5000}) -> Promise of {kind, handle, ref, role, name, locator} | {error}
 *     kind "insert": focused, all content selected; send Input.insertText(text), or a Delete key press when text is ""
 *     kind "done":   date, time, color, range ...: value set and input/change fired
 *     refuses hidden, disabled, readonly and non-editable elements; number inputs refuse text that is no number (bad_value)
 * prepareType(target, {timeout}) -> the same for typing key by key: focused, caret at the end, kind always "insert"
 * active() -> {tag, role, name, editable, readonly, disabled, ref, frame: bool} | null     what keys go to now
 * selectOption(target, [values], {timeout}) -> Promise of {selected: [values], ...located} | {error}   by value or label
 * checked(target) -> {checked: bool, ...located} | {error}
 *
 * waitForText(text, {gone = false, timeout}) -> Promise of {met: bool}     first visible match of getByText, resp. none
 * frames(n = 2, maxMs = 250) -> Promise of {painted: bool}     n animation frames; false when the page paints none in time
 * watch() -> id; changed(id) -> bool      has any DOM mutation happened since (drops the watch when true; at most 16)
 * page() -> {url, title, readyState, timeOrigin, focused, dpr, viewport: {width, height}, scroll: {x, y}, content: {width, height}}
 */
(() => {
  "use strict";
  const VERSION = 1;
  const had = Object.getOwnPropertyDescriptor(globalThis, "abf");
  if (had && had.value && had.value.version === VERSION) return had.value;

  // ---------------------------------------------------------------- DOM access
  // A form's or the document's own properties can be shadowed by elements that
  // carry a name (<input name=parentNode>), in isolated worlds too. So nothing
  // below reads a property of a node directly: only through these.
  const getter = (proto, name) => Object.getOwnPropertyDescriptor(proto, name).get;
  const read = (proto, name) => {
    const get = getter(proto, name);
    return (node) => get.call(node);
  };
  // The same for properties of one kind of element: a hostile page can make
  // elements that only bear its tag.
  const readOf = (type, name, otherwise) => {
    const get = getter(type.prototype, name);
    return (node) => (node instanceof type ? get.call(node) : otherwise);
  };
  const nodeType = read(Node.prototype, "nodeType");
  const parentNode = read(Node.prototype, "parentNode");
  const parentElement = read(Node.prototype, "parentElement");
  const firstChild = read(Node.prototype, "firstChild");
  const nextSibling = read(Node.prototype, "nextSibling");
  const nodeValue = read(Node.prototype, "nodeValue");
  const isConnected = read(Node.prototype, "isConnected");
  const textContent = read(Node.prototype, "textContent");
  const ownerDocument = read(Node.prototype, "ownerDocument");
  const tagOf = read(Element.prototype, "tagName");
  const shadowRootOf = read(Element.prototype, "shadowRoot");
  const assignedSlotOf = read(Element.prototype, "assignedSlot");
  const textAssignedSlot = read(Text.prototype, "assignedSlot");
  const previousSibling = read(Element.prototype, "previousElementSibling");
  const nextElement = read(Element.prototype, "nextElementSibling");
  const childrenOf = read(Element.prototype, "children");
  const activeElementOf = read(Document.prototype, "activeElement");
  const shadowActive = read(ShadowRoot.prototype, "activeElement");
  const documentElementOf = read(Document.prototype, "documentElement");
  const bodyOf = read(Document.prototype, "body");
  const hostOf = read(ShadowRoot.prototype, "host");
  const getRootNode = (node) => Node.prototype.getRootNode.call(node);
  const contains = (a, b) => Node.prototype.contains.call(a, b);
  const attr = (el, name) => Element.prototype.getAttribute.call(el, name);
  const hasAttr = (el, name) => Element.prototype.hasAttribute.call(el, name);
  const matches = (el, selector) => Element.prototype.matches.call(el, selector);
  const closest = (el, selector) => Element.prototype.closest.call(el, selector);
  const rectOf = (el) => Element.prototype.getBoundingClientRect.call(el);
  const checkVisibility = (el) => Element.prototype.checkVisibility.call(el);
  const assignedNodes = (slot) => (slot instanceof HTMLSlotElement ? HTMLSlotElement.prototype.assignedNodes.call(slot) : []);
  const byId = (root, id) =>
    nodeType(root) === 9 ? Document.prototype.getElementById.call(root, id)
      : nodeType(root) === 11 ? DocumentFragment.prototype.getElementById.call(root, id) : null;
  const queryAll = (root, selector) =>
    nodeType(root) === 9 ? Document.prototype.querySelectorAll.call(root, selector)
      : nodeType(root) === 11 ? DocumentFragment.prototype.querySelectorAll.call(root, selector)
        : Element.prototype.querySelectorAll.call(root, selector);

  const valueOf = {
    INPUT: readOf(HTMLInputElement, "value", ""),
    TEXTAREA: readOf(HTMLTextAreaElement, "value", ""),
  };
  const inputType = readOf(HTMLInputElement, "type", "text");
  const inputChecked = readOf(HTMLInputElement, "checked", false);
  const inputIndeterminate = readOf(HTMLInputElement, "indeterminate", false);
  const optionSelected = readOf(HTMLOptionElement, "selected", false);
  const optionLabel = readOf(HTMLOptionElement, "label", "");
  const optionValue = readOf(HTMLOptionElement, "value", "");
  const selectMultiple = readOf(HTMLSelectElement, "multiple", false);
  const selectSize = readOf(HTMLSelectElement, "size", 0);
  const selectOptions = readOf(HTMLSelectElement, "options", []);
  const selectedOptions = readOf(HTMLSelectElement, "selectedOptions", []);
  const tableRows = readOf(HTMLTableElement, "rows", []);
  const labelsGetter = {
    INPUT: readOf(HTMLInputElement, "labels", null), TEXTAREA: readOf(HTMLTextAreaElement, "labels", null),
    SELECT: readOf(HTMLSelectElement, "labels", null), BUTTON: readOf(HTMLButtonElement, "labels", null),
    OUTPUT: readOf(HTMLOutputElement, "labels", null), METER: readOf(HTMLMeterElement, "labels", null),
    PROGRESS: readOf(HTMLProgressElement, "labels", null),
  };
  const LABELABLE = new Set(["INPUT", "TEXTAREA", "SELECT", "BUTTON", "OUTPUT", "METER", "PROGRESS"]);

  // SVG and XHTML keep the case of the source; upper case is what is compared.
  const tag = (el) => tagOf(el).toUpperCase();
  /** The parent in the tree of DOM nodes, from a shadow root to its host. */
  const parentOf = (node) => {
    const parent = parentNode(node);
    if (!parent) return null;
    const type = nodeType(parent);
    if (type === 1) return parent;
    return type === 11 && parent instanceof ShadowRoot ? hostOf(parent) : null;
  };
  /** The parent in the flat tree. */
  const flatParent = (node) => {
    const slot = nodeType(node) === 1 ? assignedSlotOf(node) : nodeType(node) === 3 ? textAssignedSlot(node) : null;
    return slot || parentOf(node);
  };
  const labelsOf = (el) => {
    const get = labelsGetter[tag(el)];
    const list = get ? get(el) : null;
    return list ? Array.from(list) : [];
  };
  const idRefs = (el, name) => {
    const value = attr(el, name);
    if (!value) return [];
    const root = getRootNode(el);
    const seen = [];
    for (const id of value.split(/\s+/)) {
      if (!id) continue;
      const found = byId(root, id);
      if (found && !seen.includes(found)) seen.push(found);
    }
    return seen;
  };
  const isTrue = (value) => value !== null && value.toLowerCase() === "true";

  // -------------------------------------------------------------------- text
  // Bounds against pages made to hurt: text of one node that is looked at, and
  // levels that are gone down.
  const MAX_TEXT = 1 << 20;
  const MAX_DEPTH = 1000;
  const collapse = (text) => text.replace(/[\u200b\u00ad]/g, "").replace(/[\s]+/g, " ").trim();
  const wellFormed = (text) => (text.isWellFormed() ? text : text.toWellFormed());

  // --------------------------------------------------------- style, visibility
  // One snapshot or query looks at each element's style once. A Look is thrown
  // away with the call: styles may change between calls.
  class Look {
    constructor() {
      this.facts = new Map();
      this.sheets = new Map();
      this.lastRoot = null;
      this.lastRules = null;
    }

    of(el) {
      let f = this.facts.get(el);
      if (f === undefined) {
        f = new Facts(el);
        this.facts.set(el, f);
      }
      return f;
    }

    /** Not rendered, aria-hidden, or not slotted, by itself or an ancestor. */
    cutOff(el) {
      const above = [];
      let cut = false;
      for (let e = el; e; e = parentOf(e)) {
        const f = this.of(e);
        if (f.cut !== undefined) {
          cut = f.cut;
          break;
        }
        above.push(e);
      }
      for (let i = above.length - 1; i >= 0; i--) {
        const e = above[i];
        const f = this.of(e);
        if (!cut) {
          const parent = parentElement(e);
          cut = f.display === "none" || isTrue(attr(e, "aria-hidden")) || (parent !== null && shadowRootOf(parent) !== null && assignedSlotOf(e) === null);
        }
        f.cut = cut;
      }
      return cut;
    }

    /** Hidden from assistive technology. */
    hidden(el) {
      const f = this.of(el);
      if (f.hiding === undefined) f.hiding = this.computeHidden(el, f);
      return f.hiding;
    }

    computeHidden(el, f) {
      if (UNSPOKEN.has(f.tag)) return true;
      const isSlot = f.tag === "SLOT";
      if (f.display === "contents" && !isSlot) {
        for (let child = firstChild(el); child; child = nextSibling(child)) {
          const type = nodeType(child);
          if (type === 1 && !this.hidden(child)) return false;
          if (type === 3 && textShows(child)) return false;
        }
        return true;
      }
      if (!isSlot && !f.shown && !(f.tag === "OPTION" && closest(el, "select"))) return true;
      return this.cutOff(el);
    }

    /** The alternative text of an element whose content is replaced by a style. */
    replaced(el) {
      if (!this.rulesFor(el).own) return "";
      const content = getComputedStyle(el).content;
      return content && content.includes("/") ? contentText(content, el) : "";
    }

    /** What a look at the box needs: visible, inline. */
    box(el) {
      const f = this.of(el);
      if (f.boxed) return f;
      f.boxed = true;
      if (f.display === "contents") {
        for (let child = firstChild(el); child; child = nextSibling(child)) {
          const type = nodeType(child);
          if (type === 1 && this.box(child).visible) {
            f.visible = true;
            return f;
          }
          if (type === 3 && textShows(child)) {
            f.visible = true;
            f.inline = true;
            return f;
          }
        }
        return f;
      }
      if (!f.shown) return f;
      const rect = rectOf(el);
      f.rect = rect;
      f.visible = rect.width > 0 && rect.height > 0;
      f.inline = f.display === "inline";
      return f;
    }

    rulesFor(el) {
      // Most elements are in the tree that was asked for last.
      const root = getRootNode(el);
      if (root !== this.lastRoot) {
        let rules = this.sheets.get(root);
        if (rules === undefined) {
          rules = contentRules(root);
          this.sheets.set(root, rules);
        }
        this.lastRoot = root;
        this.lastRules = rules;
      }
      return this.lastRules;
    }

    /** Text of a ::before or ::after, "" when there is none. */
    pseudo(el, which) {
      const { pseudo } = this.rulesFor(el);
      if (pseudo === null || (pseudo !== "any" && !matches(el, pseudo))) return "";
      const style = getComputedStyle(el, which);
      const content = style.content;
      if (!content || content === "none" || content === "normal") return "";
      if (style.display === "none" || style.visibility !== "visible") return "";
      const text = contentText(content, el);
      return text && style.display !== "inline" ? " " + text + " " : text;
    }
  }

  class Facts {
    constructor(el) {
      const style = getComputedStyle(el);
      this.tag = tag(el);
      this.display = style.display || "inline";
      this.shown = style.visibility === "visible" && checkVisibility(el);
      this.cursor = style.cursor;
      this.presses = style.pointerEvents !== "none";
      this.cut = undefined;
      this.hiding = undefined;
      this.boxed = false;
      this.visible = false;
      this.inline = false;
      this.rect = null;
    }
  }

  const UNSPOKEN = new Set(["STYLE", "SCRIPT", "NOSCRIPT", "TEMPLATE"]);

  const textShows = (node) => {
    const range = document.createRange();
    range.selectNode(node);
    const rect = range.getBoundingClientRect();
    return rect.width > 0 && rect.height > 0;
  };

  /**
   * What the sheets of a tree say about generated content. pseudo: the selectors
   * of elements that may have it, joined; "any" when that cannot be told (a
   * foreign sheet, nesting, scope), null when no sheet makes any. own: elements
   * themselves may be replaced by content.
   */
  const contentRules = (root) => {
    const found = [];
    let unsure = false;
    let own = false;
    const walk = (rules, nested) => {
      for (let i = 0; i < rules.length && !unsure; i++) {
        const rule = rules[i];
        if (rule instanceof CSSStyleRule) {
          if (rule.style.content !== "") {
            const selector = rule.selectorText;
            if (/:(before|after)/i.test(selector)) {
              if (nested || selector.includes("&")) unsure = true;
              else found.push(selector);
            } else own = true;
          }
          if (rule.cssRules.length) walk(rule.cssRules, true);
        } else if (rule instanceof CSSImportRule) {
          if (rule.styleSheet) sheet(rule.styleSheet);
        } else if (rule.cssRules) {
          walk(rule.cssRules, nested || rule.constructor.name === "CSSScopeRule");
        } else if (rule.style && rule.style.content) {
          unsure = true; // declarations directly inside a nested group
        }
      }
    };
    const sheet = (s) => {
      if (s.disabled) return;
      try {
        walk(s.cssRules, false);
      } catch {
        unsure = true; // another origin's sheet does not show its rules
      }
    };
    const scope = nodeType(root) === 9 || root instanceof ShadowRoot ? root : document;
    const proto = nodeType(scope) === 9 ? Document.prototype : ShadowRoot.prototype;
    for (const s of getter(proto, "styleSheets").call(scope)) sheet(s);
    for (const s of getter(proto, "adoptedStyleSheets").call(scope)) sheet(s);
    if (unsure) return { pseudo: "any", own: true };
    if (!found.length) return { pseudo: null, own };
    // "a::before" styles what "a" matches; a bare "::before" styles everything.
    const plain = found.join(", ").replace(/::?(before|after)/gi, ":is(*)");
    try {
      queryAll(document, plain);
      return { pseudo: plain, own };
    } catch {
      return { pseudo: "any", own: true };
    }
  };

  /** The text of a computed `content`; the alternative after "/" wins. Counters, quotes and images alone are no text. */
  const contentText = (content, el) => {
    const slash = /^(?:[^"/]|"(?:[^"\\]|\\.)*")*\//.exec(content.replace(/url\("(?:[^"\\]|\\.)*"\)/g, (m) => " ".repeat(m.length)));
    const list = slash ? content.slice(slash[0].length) : content;
    let out = "";
    let at = 0;
    const token = /\s*(?:"((?:[^"\\]|\\.)*)"|attr\(\s*([\w-]+)[^)]*\))\s*/gy;
    for (let m; at < list.length && (m = token.exec(list)); at = token.lastIndex) {
      if (m[1] === undefined) out += attr(el, m[2]) || "";
      else out += m[1].replace(/\\([0-9a-f]{1,6}\s?|.)/gi, (all, c) => (/^[0-9a-f]/i.test(c) ? String.fromCodePoint(Math.min(parseInt(c, 16), 0x10ffff)) : c));
    }
    return at >= list.length ? out : "";
  };

  // -------------------------------------------------------------------- roles
  const ROLES = new Set((
    "alert alertdialog application article banner blockquote button caption cell checkbox code columnheader combobox complementary " +
    "contentinfo definition deletion dialog directory document emphasis feed figure form generic grid gridcell group heading img " +
    "insertion link list listbox listitem log main mark marquee math meter menu menubar menuitem menuitemcheckbox menuitemradio " +
    "navigation none note option paragraph presentation progressbar radio radiogroup region row rowgroup rowheader scrollbar search " +
    "searchbox separator slider spinbutton status strong subscript superscript switch tab table tablist tabpanel term textbox time " +
    "timer toolbar tooltip tree treegrid treeitem").split(" "));
  const set = (text) => new Set(text.split(" "));
  const CHECKED = set("checkbox menuitemcheckbox option radio switch menuitemradio treeitem");
  const DISABLED = set("application button composite gridcell group input link menuitem scrollbar separator tab checkbox columnheader " +
    "combobox grid listbox menu menubar menuitemcheckbox menuitemradio option radio radiogroup row rowheader searchbox select slider " +
    "spinbutton switch tablist textbox toolbar tree treegrid treeitem");
  const EXPANDED = set("application button checkbox combobox gridcell link listbox menuitem row rowheader tab treeitem columnheader " +
    "menuitemcheckbox menuitemradio switch");
  const INVALID = set("application checkbox columnheader combobox gridcell listbox radiogroup rowheader searchbox slider spinbutton " +
    "switch textbox tree");
  const LEVEL = set("heading listitem row treeitem");
  const SELECTED = set("gridcell option row tab rowheader columnheader treeitem");
  const NAMED_BY_CONTENT = set("button cell checkbox columnheader gridcell heading link menuitem menuitemcheckbox menuitemradio option " +
    "radio row rowheader switch tab tooltip treeitem");
  // Inside an element that is named by its content, these contribute theirs.
  const CONTENT_INSIDE = set("caption code contentinfo definition deletion emphasis insertion list listitem mark none paragraph " +
    "presentation region row rowgroup section strong subscript superscript table term time");
  const UNNAMED = set("caption code definition deletion emphasis generic insertion mark paragraph presentation strong subscript " +
    "suggestion superscript term time");
  const GLOBAL_ARIA = ("atomic busy controls current describedby details dropeffect flowto grabbed hidden keyshortcuts label labelledby " +
    "live owns relevant roledescription").split(" ").map((name) => "aria-" + name);
  const NATIVE_DISABLED = set("BUTTON INPUT SELECT TEXTAREA OPTION OPTGROUP");
  const PLAIN_ROLE = {
    ARTICLE: "article", ASIDE: "complementary", BLOCKQUOTE: "blockquote", BUTTON: "button", CAPTION: "caption", CODE: "code",
    DATALIST: "listbox", DD: "definition", DEL: "deletion", DETAILS: "group", DFN: "term", DIALOG: "dialog", DT: "term", EM: "emphasis",
    FIELDSET: "group", FIGURE: "figure", H1: "heading", H2: "heading", H3: "heading", H4: "heading", H5: "heading", H6: "heading",
    HR: "separator", HTML: "document", INS: "insertion", LI: "listitem", MAIN: "main", MARK: "mark", MATH: "math", MENU: "list",
    METER: "meter", NAV: "navigation", OL: "list", OPTGROUP: "group", OPTION: "option", OUTPUT: "status", P: "paragraph",
    PROGRESS: "progressbar", SEARCH: "search", STRONG: "strong", SUB: "subscript", SUP: "superscript", SVG: "img", TABLE: "table",
    TBODY: "rowgroup", TEXTAREA: "textbox", TFOOT: "rowgroup", THEAD: "rowgroup", TIME: "time", TR: "row", UL: "list",
  };
  const LANDMARK_PARENT = "article:not([role]), aside:not([role]), main:not([role]), nav:not([role]), section:not([role]), " +
    "[role=article], [role=complementary], [role=main], [role=navigation], [role=region]";
  const PARTS_OF = {
    DD: ["DL", "DIV"], DIV: ["DL"], DT: ["DL", "DIV"], LI: ["OL", "UL"], TBODY: ["TABLE"], TD: ["TR"], TFOOT: ["TABLE"],
    TH: ["TR"], THEAD: ["TABLE"], TR: ["THEAD", "TBODY", "TFOOT", "TABLE"],
  };

  const explicitlyNamed = (el) => hasAttr(el, "aria-label") || hasAttr(el, "aria-labelledby");
  const hasGlobalAria = (el, name) => GLOBAL_ARIA.some((a) => hasAttr(el, a) && !(UNNAMED.has(name) && (a === "aria-label" || a === "aria-labelledby")));
  const nativelyDisabled = (el) => {
    const name = tag(el);
    if (!NATIVE_DISABLED.has(name)) return false;
    if (hasAttr(el, "disabled")) return true;
    if (name === "OPTION" && closest(el, "optgroup[disabled]") !== null) return true;
    for (let f = closest(el, "fieldset[disabled]"); f; f = parentElement(f) && closest(parentElement(f), "fieldset[disabled]")) {
      const legend = Array.prototype.find.call(childrenOf(f), (c) => tag(c) === "LEGEND");
      if (!legend || !contains(legend, el)) return true;
    }
    return false;
  };
  const focusable = (el) => {
    const name = tag(el);
    if (nativelyDisabled(el)) return false;
    if (name === "BUTTON" || name === "DETAILS" || name === "SELECT" || name === "TEXTAREA") return true;
    if (name === "A" || name === "AREA") return hasAttr(el, "href");
    if (name === "INPUT") return inputType(el) !== "hidden";
    const index = attr(el, "tabindex");
    return index !== null && !Number.isNaN(Number(index));
  };

  const implicitRole = (el, name) => {
    const plain = PLAIN_ROLE[name];
    if (plain !== undefined) return plain;
    switch (name) {
      case "A":
      case "AREA":
        return hasAttr(el, "href") ? "link" : "";
      case "FORM":
        return explicitlyNamed(el) ? "form" : "";
      case "SECTION":
        return explicitlyNamed(el) ? "region" : "";
      case "FOOTER":
        return closest(el, LANDMARK_PARENT) ? "" : "contentinfo";
      case "HEADER":
        return closest(el, LANDMARK_PARENT) ? "" : "banner";
      case "IMG":
        return attr(el, "alt") === "" && !attr(el, "title") && !hasGlobalAria(el, "") && Number.isNaN(Number(String(attr(el, "tabindex")))) ? "presentation" : "img";
      case "INPUT":
        return inputRole(el);
      case "SELECT":
        return selectMultiple(el) || selectSize(el) > 1 ? "listbox" : "combobox";
      case "TD": {
        const table = closest(el, "table");
        const role = table ? explicitRole(table) : "";
        return role === "grid" || role === "treegrid" ? "gridcell" : "cell";
      }
      case "TH":
        return headerRole(el);
    }
    return "";
  };
  const inputRole = (el) => {
    switch (inputType(el)) {
      case "search":
        return hasAttr(el, "list") ? "combobox" : "searchbox";
      case "email": case "tel": case "text": case "url": {
        const list = attr(el, "list");
        const target = list ? byId(getRootNode(el), list) : null;
        return target && tag(target) === "DATALIST" ? "combobox" : "textbox";
      }
      case "hidden": return "";
      case "checkbox": return "checkbox";
      case "radio": return "radio";
      case "number": return "spinbutton";
      case "range": return "slider";
      case "button": case "file": case "image": case "reset": case "submit": return "button";
    }
    return "textbox";
  };
  const headerRole = (el) => {
    const scope = attr(el, "scope");
    if (scope === "col" || scope === "colgroup") return "columnheader";
    if (scope === "row" || scope === "rowgroup") return "rowheader";
    const data = (n) => n !== null && tag(n) === "TD";
    const before = previousSibling(el);
    const after = nextElement(el);
    const row = parentElement(el) && tag(parentElement(el)) === "TR" ? parentElement(el) : null;
    if (!before && !after) {
      if (row) {
        const table = closest(row, "table");
        if (table && tableRows(table).length <= 1) return "";
      }
      return "columnheader";
    }
    return data(before) || data(after) ? "rowheader" : "columnheader";
  };

  const explicitRole = (el) => {
    const value = attr(el, "role");
    if (value === null) return "";
    for (const token of value.split(" ")) if (ROLES.has(token.trim())) return token.trim();
    return "";
  };
  /** The role with presentation conflicts resolved; "" when it has none. */
  const roleOf = (el) => {
    const name = tag(el);
    if (!hasAttr(el, "role")) return inheritedRole(el, name);
    const role = explicitRole(el);
    if (role === "") return inheritedRole(el, name);
    if (role === "none" || role === "presentation") {
      const own = inheritedRole(el, name);
      if (hasGlobalAria(el, own) || focusable(el)) return own;
    }
    return role;
  };
  const inheritedRole = (el, name) => {
    const role = implicitRole(el, name);
    if (role === "") return "";
    for (let e = el; PARTS_OF[tag(e)]; ) {
      const parent = parentOf(e);
      if (!parent || !PARTS_OF[tag(e)].includes(tag(parent))) break;
      const parentRole = hasAttr(parent, "role") ? explicitRole(parent) : "";
      if ((parentRole === "none" || parentRole === "presentation") && !hasGlobalAria(parent, parentRole) && !focusable(parent)) return parentRole;
      e = parent;
    }
    return role;
  };

  // --------------------------------------------------------------------- names
  // The accessible name after accname 1.2, and which elements it came from.
  class Naming {
    constructor(look) {
      this.look = look;
      this.names = new Map();
    }

    /** {name, from}: from is a list of contributing elements or null. */
    of(el, role) {
      let n = this.names.get(el);
      if (n === undefined) {
        n = this.compute(el, role);
        this.names.set(el, n);
      }
      return n;
    }

    compute(el, role, intoHidden) {
      if (UNNAMED.has(role)) return NO_NAME;
      // Most elements have no role that takes a name from somewhere.
      if (role === "" && tag(el) !== "SUMMARY" && !(el instanceof SVGElement) && !hasAttr(el, "aria-label") && !hasAttr(el, "aria-labelledby") && !hasAttr(el, "title") && !LABELABLE.has(tag(el))) return NO_NAME;
      const ctx = { visited: new Set(), from: [], root: el, content: false, depth: 0 };
      const text = collapse(this.text(el, ctx, intoHidden ? { ...SELF, intoHidden } : SELF));
      return { name: text, from: ctx.from.length && ctx.content ? ctx.from : null };
    }

    hiddenFor(el, how) {
      if (UNSPOKEN.has(tag(el))) return true;
      return !how.intoHidden && this.look.hidden(el);
    }

    text(el, ctx, how) {
      if (ctx.visited.has(el)) return "";
      if (this.hiddenFor(el, how)) {
        ctx.visited.add(el);
        return "";
      }
      const name = tag(el);
      if (!how.labelledBy) {
        const refs = idRefs(el, "aria-labelledby");
        if (refs.length) {
          const mark = ctx.from.length;
          const parts = [];
          for (const ref of refs) {
            parts.push(this.text(ref, ctx, { inside: "", label: false, labelledBy: true, native: false, intoHidden: this.look.hidden(ref), owner: el }));
          }
          const joined = parts.join(" ");
          if (joined.trim() !== "") {
            if (el === ctx.root) ctx.content = true;
            return joined;
          }
          ctx.from.length = mark;
        }
      }
      const role = roleOf(el);
      if ((how.label || how.labelledBy || how.inside === "descendant") && !this.isOwn(el, how)) {
        const value = this.embeddedValue(el, name, role, ctx, how);
        if (value !== null) {
          ctx.visited.add(el);
          if (value && el !== ctx.root && role !== "combobox" && role !== "listbox") ctx.from.push(el);
          return value;
        }
      }
      const label = attr(el, "aria-label");
      if (label !== null && label.trim() !== "") {
        ctx.visited.add(el);
        if (el !== ctx.root) ctx.from.push(el);
        return label;
      }
      const plain = role !== "none" && role !== "presentation";
      if (plain) {
        const native = this.native(el, name, ctx, how);
        if (native !== null) return native;
      }
      if (NAMED_BY_CONTENT.has(role) || (how.inside === "descendant" && (role === "" || CONTENT_INSIDE.has(role))) || name === "SUMMARY" ||
        how.labelledBy || how.label || how.native) {
        ctx.visited.add(el);
        const text = this.content(el, ctx, how.inside === "self" ? { ...how, inside: "descendant" } : how);
        if (how.inside === "self" ? text.trim() : text) {
          if (el === ctx.root) ctx.content = true;
          else ctx.from.push(el);
          return text;
        }
      }
      ctx.visited.add(el);
      if (plain || name === "IFRAME") {
        const title = attr(el, "title");
        if (title !== null && title.trim() !== "") {
          if (el !== ctx.root) ctx.from.push(el);
          return title;
        }
      }
      return "";
    }

    /** The control whose name is being computed, met again inside its own label. */
    isOwn(el, how) {
      return how.owner === el;
    }

    embeddedValue(el, name, role, ctx, how) {
      switch (role) {
        case "textbox":
          if (name === "INPUT" || name === "TEXTAREA") return valueOf[name](el);
          return textContent(el) || "";
        case "combobox":
        case "listbox": {
          let options;
          if (name === "SELECT") {
            options = Array.from(selectedOptions(el));
            if (!options.length && selectOptions(el).length) options = [selectOptions(el)[0]];
          } else {
            const list = role === "combobox" ? Array.from(queryAll(el, "*")).find((e) => roleOf(e) === "listbox") : el;
            options = list ? Array.from(queryAll(list, '[aria-selected="true"]')).filter((e) => roleOf(e) === "option") : [];
          }
          if (!options.length && name === "INPUT") return valueOf.INPUT(el);
          ctx.visited.add(el);
          return options.map((o) => this.text(o, ctx, how.inside === "self" ? { ...how, inside: "descendant" } : how)).join(" ");
        }
        case "progressbar": case "scrollbar": case "slider": case "spinbutton": case "meter":
          if (hasAttr(el, "aria-valuetext")) return attr(el, "aria-valuetext") || "";
          if (hasAttr(el, "aria-valuenow")) return attr(el, "aria-valuenow") || "";
          return attr(el, "value") || "";
        case "menu":
          return "";
      }
      return null;
    }

    labelText(el, labels, ctx, how) {
      ctx.visited.add(el);
      return labels.map((label) => this.text(label, ctx, { inside: "", label: true, labelledBy: false, native: false, owner: el, intoHidden: this.look.hidden(label) })).filter((t) => t !== "").join(" ");
    }

    /** The host language's name; null when it has no say. */
    native(el, name, ctx, how) {
      const inner = el !== ctx.root;
      const mine = (text) => {
        ctx.visited.add(el);
        if (inner && text) ctx.from.push(el);
        return text;
      };
      const title = () => attr(el, "title") || "";
      // An aria-labelledby that leads somewhere, if only to nothing, shuts labels,
      // legends and placeholders out.
      const referred = idRefs(el, "aria-labelledby").length > 0;
      const labelled = () => {
        if (referred) return "";
        const labels = LABELABLE.has(name) ? labelsOf(el) : [];
        if (!labels.length) return "";
        const text = this.labelText(el, labels, ctx, how);
        if (!inner && text.trim()) ctx.content = true;
        return text;
      };
      const fromChild = (match) => {
        for (let child = firstChild(el); child; child = nextSibling(child)) {
          if (nodeType(child) === 1 && match(child)) {
            ctx.visited.add(el);
            if (!inner) ctx.content = true;
            return this.text(child, ctx, { ...how, native: true, intoHidden: how.intoHidden || this.look.hidden(child) });
          }
        }
        return null;
      };
      switch (name) {
        case "INPUT": {
          const type = inputType(el);
          if (type === "button" || type === "submit" || type === "reset") {
            const value = valueOf.INPUT(el) || "";
            if (value.trim()) return mine(value);
            if (type === "submit") return mine("Submit");
            if (type === "reset") return mine("Reset");
            return mine(title());
          }
          const text = how.labelledBy && (type === "file" || type === "image") ? "" : labelled();
          if (text) {
            ctx.visited.add(el);
            return text;
          }
          if (type === "file") return mine("Choose File");
          if (type === "image") return mine([attr(el, "alt") || "", title(), "Submit"].find((t) => t.trim()));
          const ph = type === "text" || type === "password" || type === "search" || type === "tel" || type === "email" || type === "url" || type === "number";
          return mine(title() || (ph && !referred ? attr(el, "placeholder") || "" : ""));
        }
        case "TEXTAREA":
        case "SELECT": {
          const text = labelled();
          if (text) {
            ctx.visited.add(el);
            return text;
          }
          return mine(title() || (name === "TEXTAREA" && !referred ? attr(el, "placeholder") || "" : ""));
        }
        case "BUTTON":
        case "METER":
        case "OUTPUT":
        case "PROGRESS": {
          const text = labelled();
          if (text) {
            ctx.visited.add(el);
            return text;
          }
          return name === "BUTTON" ? null : mine(title());
        }
        case "FIELDSET": {
          if (referred) return null;
          const text = fromChild((c) => tag(c) === "LEGEND");
          return text !== null ? text : mine(title());
        }
        case "FIGURE": {
          if (referred) return null;
          const text = fromChild((c) => tag(c) === "FIGCAPTION");
          return text !== null ? text : mine(title());
        }
        case "IMG":
        case "AREA": {
          const alt = attr(el, "alt") || "";
          return mine(alt.trim() ? alt : title());
        }
        case "TABLE": {
          const text = fromChild((c) => tag(c) === "CAPTION");
          if (text !== null) return text;
          const summary = attr(el, "summary") || "";
          return summary ? mine(summary) : null;
        }
        case "A": {
          if (!(el instanceof SVGElement)) return null;
          const xlink = Element.prototype.getAttributeNS.call(el, "http://www.w3.org/1999/xlink", "title") || "";
          return xlink.trim() ? mine(xlink) : null;
        }
      }
      if (el instanceof SVGElement) {
        const text = fromChild((c) => tag(c) === "TITLE" && c instanceof SVGElement);
        return text;
      }
      return null;
    }

    content(el, ctx, how) {
      if (ctx.depth > MAX_DEPTH) return "";
      const replaced = this.look.replaced(el);
      if (replaced) return replaced;
      let out = "";
      ctx.depth++;
      const take = (node) => {
        const type = nodeType(node);
        if (type === 1) {
          const f = this.look.of(node);
          const text = this.text(node, ctx, how);
          out += f.display !== "inline" || f.tag === "BR" ? " " + text + " " : text;
        } else if (type === 3) {
          const text = nodeValue(node);
          out += text.length > MAX_TEXT ? text.slice(0, MAX_TEXT) : text;
        }
      };
      out += this.look.pseudo(el, "::before");
      const slotted = tag(el) === "SLOT" ? assignedNodes(el) : [];
      if (slotted.length) {
        for (const node of slotted) take(node);
      } else {
        for (let c = firstChild(el); c; c = nextSibling(c)) {
          const type = nodeType(c);
          if (!(type === 1 ? assignedSlotOf(c) : type === 3 ? textAssignedSlot(c) : null)) take(c);
        }
        const shadow = shadowRootOf(el);
        if (shadow) for (let c = firstChild(shadow); c; c = nextSibling(c)) take(c);
        for (const owned of idRefs(el, "aria-owns")) take(owned);
      }
      ctx.depth--;
      return out + this.look.pseudo(el, "::after");
    }
  }
  const NO_NAME = { name: "", from: null };
  const SELF = { inside: "self", label: false, labelledBy: false, native: false, intoHidden: false, owner: null };

  // -------------------------------------------------------------------- states
  const ariaDisabled = (el, role) => {
    for (let e = el, first = true; e; e = parentOf(e), first = false) {
      if (first && !DISABLED.has(role)) continue;
      const value = (attr(e, "aria-disabled") || "").toLowerCase();
      if (value === "true") return true;
      if (value === "false") return false;
    }
    return false;
  };
  const isDisabled = (el, role) => nativelyDisabled(el) || ariaDisabled(el, role);

  const checkedState = (el, name) => {
    if (name === "INPUT") {
      if (inputIndeterminate(el)) return "mixed";
      const type = inputType(el);
      if (type === "checkbox" || type === "radio") return inputChecked(el);
    }
    const value = attr(el, "aria-checked");
    if (value === "true") return true;
    if (value === "mixed") return "mixed";
    return false;
  };
  const levelOf = (el, name) => {
    if (/^H[1-6]$/.test(name)) return Number(name[1]);
    const value = attr(el, "aria-level");
    const level = value === null ? NaN : Number(value);
    return Number.isInteger(level) && level >= 1 ? level : 0;
  };
  const flag = (name, value) => (value === true ? " [" + name + "]" : value ? " [" + name + "=" + value + "]" : "");

  // ---------------------------------------------------------------------- refs
  const refOf = new WeakMap(); // element -> {n, role, name}
  const byRef = new Map(); // n -> WeakRef(element)
  let lastRef = 0;
  let prefix = null;
  const mint = (el, role, name) => {
    const had = refOf.get(el);
    if (had) {
      if (had.role === role && had.name === name) return had.n;
      byRef.delete(had.n);
    }
    const n = ++lastRef;
    refOf.set(el, { n, role, name });
    byRef.set(n, new WeakRef(el));
    return n;
  };

  // ------------------------------------------------------------------ the walk
  class Item {
    constructor(el, role, name, from) {
      this.el = el;
      this.role = role;
      this.name = name;
      this.from = from;
      this.kids = [];
      this.ref = 0;
      this.states = "";
      this.active = false;
      this.pointer = false;
      this.url = null;
      this.placeholder = null;
      this.facts = null;
      this.index = 0;
      this.last = 0;
      this.leaf = true; // had nothing but text when it was built
      this.gone = false; // not printed
      this.deep = false; // below the depth limit
      this.covered = false; // said by the name of an ancestor
    }
  }

  class Walk {
    constructor(root, options, surplus) {
      this.look = new Look();
      this.naming = new Naming(this.look);
      this.boxes = !!options.boxes;
      this.depth = options.depth === undefined || options.depth === null ? Infinity : options.depth;
      this.max = options.maxBytes > 0 ? options.maxBytes : Infinity;
      // With a cap, building ends where some times as much is there as can be
      // printed: distilling seldom takes more than half.
      this.enough = this.max * surplus;
      this.built = 0;
      this.stopped = false;
      this.tooDeep = false;
      this.longest = Math.min(MAX_TEXT, this.max);
      this.seen = new Set();
      this.items = new Map();
      this.count = 0;
      this.level = 0;
      this.root = root;
      this.focus = activeElementOf(document);
      this.hasFocus = Document.prototype.hasFocus.call(document);
      this.frames = [];
      this.top = new Item(null, "fragment", "", null);
      this.visit(this.top, root, true);
      this.top.last = this.count;
    }

    visit(parent, node, visible) {
      if (this.stopped || this.seen.has(node)) return;
      this.seen.add(node);
      const type = nodeType(node);
      if (type === 3) {
        if (visible && parent.role !== "textbox") {
          const text = nodeValue(node);
          if (text) this.push(parent, text);
        }
        return;
      }
      if (type !== 1) return;
      const f = this.look.of(node);
      const shows = !this.look.hidden(node) || this.look.box(node).visible;
      const item = shows ? this.item(node, f) : null;
      if (item) {
        parent.kids.push(item);
        parent.leaf = false;
        this.built += item.role === "generic" ? item.name.length : item.name.length + 30;
      }
      if (this.level < MAX_DEPTH) {
        this.level++;
        this.fill(item || parent, node, f, shows);
        this.level--;
      } else this.tooDeep = true;
      if (item) item.last = this.count;
      if (this.built > this.enough) this.stopped = true;
    }

    push(item, text) {
      const kept = text.length > this.longest ? text.slice(0, this.longest) + "…" : text;
      this.built += kept.length > 20 ? kept.length : kept.trim().length;
      item.kids.push(kept);
    }

    item(el, f) {
      const name = f.tag;
      let role;
      let label = NO_NAME;
      if (name === "IFRAME") {
        role = "iframe";
        this.look.box(el);
      } else {
        role = roleOf(el);
        if (role === "none" || role === "presentation") return null;
        this.look.box(el);
        if ((role === "" || role === "generic") && f.inline) {
          const only = firstChild(el);
          if (only && nodeType(only) === 3 && !nextSibling(only)) return null;
        }
        label = this.naming.of(el, role);
        if (role === "") role = "generic";
      }
      const item = new Item(el, role, label.name, label.from);
      item.facts = f;
      item.index = ++this.count;
      this.items.set(el, item);
      if (f.visible && f.presses) item.ref = mint(el, role, label.name);
      item.pointer = item.ref !== 0 && f.cursor === "pointer";
      item.active = el === this.focus && this.hasFocus;
      if (role === "iframe") {
        if (item.active) item.states = " [active]";
        return item;
      }
      this.states(item, el, role, name);
      if (name === "INPUT" || name === "TEXTAREA") {
        const type = name === "INPUT" ? inputType(el) : "";
        if (type !== "checkbox" && type !== "radio" && type !== "file") this.push(item, valueOf[name](el));
      }
      return item;
    }

    states(item, el, role, name) {
      let s = "";
      if (CHECKED.has(role)) s += flag("checked", checkedState(el, name));
      if (DISABLED.has(role) && isDisabled(el, role)) s += " [disabled]";
      if (EXPANDED.has(role) && (name === "DETAILS" ? hasAttr(el, "open") : attr(el, "aria-expanded") === "true")) s += " [expanded]";
      if (item.active) s += " [active]";
      if (INVALID.has(role)) {
        const value = (attr(el, "aria-invalid") || "").trim();
        if (value && value.toLowerCase() !== "false") s += flag("invalid", value === "grammar" || value === "spelling" ? value : true);
      }
      if (LEVEL.has(role)) s += flag("level", levelOf(el, name));
      if (role === "button") {
        const value = attr(el, "aria-pressed");
        s += flag("pressed", value === "true" ? true : value === "mixed" ? "mixed" : false);
      }
      if (SELECTED.has(role)) s += flag("selected", name === "OPTION" ? optionSelected(el) : isTrue(attr(el, "aria-selected")));
      item.states = s;
    }

    fill(item, el, f, visible) {
      const block = f.display !== "inline" || f.tag === "BR";
      if (block) item.kids.push(" ");
      const before = this.look.pseudo(el, "::before");
      if (before) item.kids.push(before);
      const slotted = f.tag === "SLOT" ? assignedNodes(el) : [];
      if (slotted.length) {
        for (const node of slotted) this.visit(item, node, visible);
      } else if (f.tag !== "IFRAME") {
        for (let c = firstChild(el); c; c = nextSibling(c)) {
          const type = nodeType(c);
          if (type === 1 ? !assignedSlotOf(c) : type === 3 && !textAssignedSlot(c)) this.visit(item, c, visible);
        }
        const shadow = shadowRootOf(el);
        if (shadow) for (let c = firstChild(shadow); c; c = nextSibling(c)) this.visit(item, c, visible);
      }
      if (hasAttr(el, "aria-owns")) for (const owned of idRefs(el, "aria-owns")) this.visit(item, owned, visible);
      const after = this.look.pseudo(el, "::after");
      if (after) item.kids.push(after);
      if (block) item.kids.push(" ");
      if (this.items.get(el) !== item) return;
      if (item.role === "link" && hasAttr(el, "href")) item.url = shortURL(attr(el, "href"));
      if (item.role === "textbox") {
        const text = attr(el, "placeholder");
        if (text && text !== item.name) item.placeholder = text;
      }
    }

    // Distilling, bottom-up: what says nothing goes.
    distill(item, insidePointer, depth) {
      const inside = insidePointer || item.pointer;
      const kids = [];
      let text = "";
      const flush = () => {
        const clean = collapse(text);
        if (clean) kids.push(clean);
        text = "";
      };
      for (const kid of item.kids) {
        if (typeof kid === "string") {
          text += kid;
          continue;
        }
        const kept = this.distill(kid, inside, depth + 1);
        if (kept === null) continue;
        flush();
        kids.push(kept);
      }
      flush();
      item.kids = kids;
      item.deep = depth > this.depth;
      if (item.role === "fragment") return item;
      const same = kids.length === 1 && kids[0] === item.name;
      if (same) kids.length = 0;
      if (item.role === "img" && !item.name && !kids.length && !(item.pointer && !insidePointer)) {
        item.gone = true;
        return null;
      }
      if (item.name) {
        for (let i = kids.length - 1; i >= 0; i--) {
          const kid = kids[i];
          if (typeof kid !== "string" && kid.role === "generic" &&
            (kid.name ? kid.name === item.name && !kid.kids.length : kid.kids.length === 1 && kid.kids[0] === item.name)) {
            kid.gone = true;
            kids.splice(i, 1);
          }
        }
        const lone = same || (kids.length === 1 && kids[0] === item.name);
        if (lone) kids.length = 0;
        if (item.from && item.ref) this.dropName(item, lone);
      }
      if (item.role === "generic") {
        if (kids.length === 1 && typeof kids[0] !== "string") {
          const only = kids[0];
          if (only.role === "generic" && !only.name && only.kids.every((k) => typeof k === "string")) {
            if (only.kids.length) {
              only.gone = true;
              item.kids = only.kids;
              return item;
            }
          }
        }
        if (!item.name) {
          if (!kids.length && !(item.pointer && !insidePointer)) return null;
          if (kids.length === 1 && typeof kids[0] !== "string" && kids[0].ref) return kids[0];
        }
      }
      return item;
    }

    /** Drops a name that only repeats what the subtree prints anyway. */
    dropName(item, keep) {
      let any = false;
      let all = true;
      const sources = [];
      for (const el of item.from) {
        const source = this.items.get(el);
        if (!source || source === item || !source.ref || source.index > item.last) continue;
        any = true;
        sources.push(source);
        if (source.index < item.index) all = false;
        else if (!source.covered && (source.gone || source.deep || (source.role === "generic" && source.leaf))) all = false;
      }
      if (any && all && !keep) item.name = "";
      else for (const source of sources) source.covered = true;
    }

    render() {
      this.distill(this.top, false, -1);
      this.out = [];
      this.bytes = 0;
      this.lost = { lines: 0, bytes: 0, within: "" };
      this.open = [];
      for (const kid of this.top.kids) {
        if (typeof kid === "string") this.line("- text: " + quoteValue(kid));
        else this.put(kid, 0, false, "");
      }
      const unseen = this.stopped || this.tooDeep;
      const cut = this.lost.lines || unseen ? this.lost : null;
      if (cut) {
        const rest = unseen ? remaining(this.root, this.seen) : 0;
        const what = [];
        if (cut.lines) what.push(cut.lines + " more lines (" + cut.bytes + " bytes)");
        if (rest) what.push("about " + rest + " more elements");
        this.out.push("# cut: " + (what.join(" and ") || "the rest") + " did not fit" + (cut.within ? ", the first of them in " + cut.within : "") + "; take a snapshot with target or depth to see a part");
      }
      return { text: wellFormed(this.out.join("\n")), lines: this.out.length, frames: this.frames, cut };
    }

    /** Adds a line, or counts it where it does not fit. Once one is left out, so are all that follow. */
    line(text) {
      const bytes = byteLength(text) + 1;
      if (this.lost.lines === 0 && this.bytes + bytes + CUT_LINE <= this.max) {
        this.bytes += bytes;
        this.out.push(text);
        return true;
      }
      if (this.lost.lines === 0) {
        // A line too long for the cap is shown as far as there is room.
        const room = this.max - this.bytes - CUT_LINE;
        if (this.max < Infinity && room > 200 && bytes > room) {
          let end = Math.floor(room / 3) - 10;
          if (/[\ud800-\udbff]/.test(text[end - 1])) end--;
          this.out.push(text.slice(0, end) + "…" + (/^\s*- [^"']*: "/.test(text) ? '"' : ""));
        }
        this.lost.within = this.open.length ? this.open[this.open.length - 1] : "";
      }
      this.lost.lines++;
      this.lost.bytes += bytes;
      return false;
    }

    put(item, level, pointer, indent) {
      let key = item.role;
      if (item.name && item.name.length <= 900) {
        const name = item.name;
        key += " " + (name.length > 1 && name[0] === "/" && name[name.length - 1] === "/" ? name : JSON.stringify(name));
      }
      key += item.states;
      let inside = pointer;
      if (item.ref) {
        key += " [ref=" + prefix + "e" + item.ref + "]";
        if (item.pointer && !pointer) {
          key += " [cursor=pointer]";
          inside = true;
        }
      }
      if (this.boxes) {
        const r = item.facts.rect || rectOf(item.el);
        key += " [box=" + Math.round(r.x) + "," + Math.round(r.y) + "," + Math.round(r.width) + "," + Math.round(r.height) + "]";
      }
      const line = indent + "- " + quoteKey(key);
      const props = item.url !== null || item.placeholder !== null;
      const cut = level >= this.depth;
      if (!props && item.kids.length === 1 && typeof item.kids[0] === "string") {
        this.line(line + ": " + quoteValue(item.kids[0]));
        return;
      }
      if (!props && (cut || !item.kids.length)) {
        const at = this.out.length;
        if (this.line(line) && item.role === "iframe" && item.ref && !cut) {
          this.frames.push({ line: at, ref: prefix + "e" + item.ref, handle: handleFor(item.el), indent: indent.length, depth: level });
        }
        return;
      }
      this.line(line + ":");
      const deeper = indent + "  ";
      if (item.ref) this.open.push(item.role + " [ref=" + prefix + "e" + item.ref + "]");
      if (item.url !== null) this.line(deeper + "- /url: " + quoteValue(item.url));
      if (item.placeholder !== null) this.line(deeper + "- /placeholder: " + quoteValue(item.placeholder));
      if (!cut) {
        for (const kid of item.kids) {
          if (typeof kid === "string") this.line(deeper + "- text: " + quoteValue(kid));
          else this.put(kid, level + 1, inside, deeper);
        }
      }
      if (item.ref) this.open.pop();
    }
  }
  // Room kept for the line that says what was cut.
  const CUT_LINE = 240;
  const encoder = new TextEncoder();
  const byteLength = (text) => (/^[\x00-\x7f]*$/.test(text) ? text.length : encoder.encode(text).length);
  /** How many elements of the light tree below root were not visited. */
  const remaining = (root, seen) => {
    const all = queryAll(root, "*");
    let n = 0;
    for (let i = 0; i < all.length; i++) if (!seen.has(all[i])) n++;
    return n;
  };
  /** What a snapshot of the page starts from: the body, or the frameset. */
  const rootOf = () => bodyOf(document) || documentElementOf(document);

  const shortURL = (url) => {
    if (!url.startsWith("data:")) return url;
    const comma = url.indexOf(",");
    return comma < 0 ? url : url.slice(0, comma + 1) + "…";
  };

  // ------------------------------------------------------------------- quoting
  const needsQuotes = (text) =>
    text === "" || /^\s|\s$|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|^[-&*\],?!>|@"'#%[]|:(?:\s|$)|\s#|[\n\r{}`]/.test(text) ||
    !Number.isNaN(Number(text)) || /^(?:y|n|yes|no|true|false|on|off|null)$/i.test(text);
  const quoteKey = (key) => (needsQuotes(key) ? "'" + key.replace(/'/g, "''") + "'" : key);
  const quoteValue = (text) => {
    if (!needsQuotes(text)) return text;
    return '"' + text.replace(/[\\"\x00-\x1f\x7f-\x9f]/g, (c) => {
      switch (c) {
        case "\\": return "\\\\";
        case '"': return '\\"';
        case "\b": return "\\b";
        case "\f": return "\\f";
        case "\n": return "\\n";
        case "\r": return "\\r";
        case "\t": return "\\t";
      }
      return "\\x" + c.charCodeAt(0).toString(16).padStart(2, "0");
    }) + '"';
  };
  // ---------------------------------------------------------- refs and handles
  class Failure extends Error {
    constructor(code, message, more) {
      super(message);
      this.answer = { error: { code, message, ...more } };
    }
  }
  const handleOf = new WeakMap(); // element -> number
  const byHandle = new Map(); // number -> WeakRef(element)
  let lastHandle = 0;
  const handleFor = (el) => {
    let n = handleOf.get(el);
    if (n === undefined) {
      n = ++lastHandle;
      handleOf.set(el, n);
      byHandle.set(n, new WeakRef(el));
      // Elements that are gone leave their entries behind: sweep now and then.
      if (n % 4096 === 0) for (const [k, weak] of byHandle) if (!weak.deref()) byHandle.delete(k);
    }
    return "h" + n;
  };
  const refText = (el) => {
    const r = refOf.get(el);
    return r && byRef.has(r.n) ? (prefix || "") + "e" + r.n : "";
  };
  const REF = /^(f\d+)?e(\d+)$/;
  const fromRef = (text) => {
    const [, own = "", n] = REF.exec(text);
    const el = own === (prefix || "") ? byRef.get(Number(n))?.deref() : undefined;
    if (!el || !isConnected(el) || ownerDocument(el) !== document) {
      throw new Failure("stale_ref", "ref " + text + " is not in the current page snapshot");
    }
    return el;
  };
  const say = (role, name) => role + (name ? " " + JSON.stringify(name.length > 80 ? name.slice(0, 79) + "…" : name) : "");

  // ------------------------------------------------------------------- queries
  // A query is a list of steps. A step takes the elements (or documents) found
  // so far and answers those it finds in them, in document order, each once.
  class Query {
    constructor(strict) {
      this.look = new Look();
      this.naming = new Naming(this.look);
      this.texts = new Map();
      this.all = new Map();
      this.labels = new Map();
      this.strict = strict;
    }

    /** Every element below a root, open shadow roots included. */
    below(root) {
      let list = this.all.get(root);
      if (list) return list;
      list = [];
      const add = (scope) => {
        const found = queryAll(scope, "*");
        for (let i = 0; i < found.length; i++) {
          list.push(found[i]);
          const shadow = shadowRootOf(found[i]);
          if (shadow) add(shadow);
        }
      };
      if (nodeType(root) === 1 && shadowRootOf(root)) add(shadowRootOf(root));
      add(root);
      this.all.set(root, list);
      return list;
    }

    role(el) {
      return tag(el) === "IFRAME" ? "iframe" : roleOf(el);
    }

    name(el) {
      return this.naming.of(el, roleOf(el)).name;
    }

    /** The text of an element as people see it in the source: spaces collapsed, no scripts or styles. */
    text(el) {
      let t = this.texts.get(el);
      if (t === undefined) {
        t = this.rawText(el, 0).replace(/[\u200b\u00ad]/g, "").replace(/\s+/g, " ").trim();
        this.texts.set(el, t);
      }
      return t;
    }

    rawText(node, depth) {
      if (depth > MAX_DEPTH) return "";
      if (nodeType(node) === 1) {
        const name = tag(node);
        if (UNSPOKEN.has(name) || name === "HEAD") return "";
        if (name === "INPUT") {
          const type = inputType(node);
          return type === "submit" || type === "button" || type === "reset" ? valueOf.INPUT(node) : "";
        }
      }
      let out = "";
      for (let c = firstChild(node); c; c = nextSibling(c)) {
        const type = nodeType(c);
        if (type === 3) out += nodeValue(c);
        else if (type === 1) out += this.rawText(c, depth + 1);
      }
      const shadow = nodeType(node) === 1 ? shadowRootOf(node) : null;
      return shadow ? out + this.rawText(shadow, depth + 1) : out;
    }

    /** Whether the element, but none of its children, has the text. */
    hasOwnText(el, match) {
      if (UNSPOKEN.has(tag(el)) || !match(this.text(el)) || closest(el, "head") !== null) return false;
      for (let c = firstChild(el); c; c = nextSibling(c)) {
        if (nodeType(c) === 1 && !UNSPOKEN.has(tag(c)) && match(this.text(c))) return false;
      }
      const shadow = shadowRootOf(el);
      if (shadow) for (let c = firstChild(shadow); c; c = nextSibling(c)) if (nodeType(c) === 1 && match(this.text(c))) return false;
      return true;
    }

    /** Texts of what labels an element, for getByLabel. */
    labelTexts(el) {
      let list = this.labels.get(el);
      if (!list) {
        const refs = idRefs(el, "aria-labelledby");
        list = refs.length ? refs.map((r) => this.text(r)) : [];
        const label = attr(el, "aria-label");
        if (!refs.length && label !== null && label.trim()) list.push(collapse(label));
        if (!list.length) for (const l of labelsOf(el)) list.push(this.text(l));
        this.labels.set(el, list);
      }
      return list;
    }

    visible(el) {
      return this.look.box(el).visible;
    }

    run(steps, scopes = [document]) {
      let found = scopes;
      for (const step of steps) found = step(this, found);
      return found.filter((n) => nodeType(n) === 1);
    }
  }
  const unique = (list) => (list.length < 2 ? list : Array.from(new Set(list)));
  const inOrder = (list) => list.sort((a, b) => {
    if (a === b) return 0;
    return Node.prototype.compareDocumentPosition.call(a, b) & 4 ? -1 : 1;
  });
  const gather = (q, scopes, find) => {
    if (scopes.length === 1) return find(scopes[0]);
    return inOrder(unique(scopes.flatMap(find)));
  };
  const filterBelow = (test) => (q, scopes) => gather(q, scopes, (root) => q.below(root).filter((el) => test(q, el)));

  // Matching of texts: a substring without regard to case, the exact text, or a regular expression.
  const matcher = (value, exact) => {
    if (value instanceof RegExp) {
      const re = new RegExp(value.source, value.flags.replace(/[gy]/g, ""));
      return (text) => re.test(text);
    }
    const want = collapse(String(value));
    if (exact) return (text) => text === want;
    const low = want.toLowerCase();
    return (text) => text.toLowerCase().includes(low);
  };

  const stepCSS = (selector) => {
    const parts = splitPseudo(selector);
    try {
      for (const part of parts) queryAll(document, part.css);
    } catch {
      throw new Failure("bad_selector", JSON.stringify(selector) + " is not a valid selector");
    }
    return (q, scopes) => gather(q, scopes, (root) => {
      const hosts = q.below(root).filter((el) => shadowRootOf(el));
      const roots = [root, ...hosts.map(shadowRootOf)];
      if (nodeType(root) === 1 && shadowRootOf(root)) roots.push(shadowRootOf(root));
      const found = new Set();
      for (const part of parts) {
        for (const r of roots) for (const el of queryAll(r, part.css)) if (part.tests.every((t) => t(q, el))) found.add(el);
      }
      return hosts.length || parts.length > 1 ? inOrder(Array.from(found)) : Array.from(found);
    });
  };
  /** Takes :has-text(), :text(), :text-is() and :visible off the end of each alternative of a selector. */
  const splitPseudo = (selector) => {
    if (!/:(has-text|text|text-is|text-matches|visible)\b/.test(selector)) return [{ css: selector, tests: [] }];
    return splitTop(selector, ",").map((alternative) => {
      const tests = [];
      const css = alternative.trim().replace(/(?::visible|:(?:has-text|text-is|text)\(\s*(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^()]*)\s*\))+$/, (all) => {
        for (const m of all.matchAll(/:(visible|has-text|text-is|text)(?:\(\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|([^()]*?))\s*\))?/g)) {
          const value = (m[2] ?? m[3] ?? m[4] ?? "").replace(/\\(.)/g, "$1");
          if (m[1] === "visible") tests.push((q, el) => q.visible(el));
          else if (m[1] === "has-text") tests.push((q, el) => matcher(value)(q.text(el)));
          else tests.push((q, el) => q.hasOwnText(el, matcher(value, m[1] === "text-is")));
        }
        return "";
      });
      return { css: css || "*", tests };
    });
  };
  /** Splits at a separator outside quotes, brackets and regular expressions. */
  const splitTop = (text, separator) => {
    const parts = [];
    let depth = 0;
    let quote = "";
    let from = 0;
    for (let i = 0; i < text.length; i++) {
      const c = text[i];
      if (c === "\\") i++;
      else if (quote) {
        if (c === quote) quote = "";
      } else if (c === '"' || c === "'" || c === "`") quote = c;
      else if (c === "(" || c === "[" || c === "{") depth++;
      else if (c === ")" || c === "]" || c === "}") depth--;
      else if (depth === 0 && text.startsWith(separator, i)) {
        parts.push(text.slice(from, i));
        i += separator.length - 1;
        from = i + 1;
      }
    }
    parts.push(text.slice(from));
    return parts;
  };
  const stepText = (value, exact) => {
    const match = matcher(value, exact);
    return filterBelow((q, el) => q.hasOwnText(el, match));
  };
  /** text="x": an element one of whose own runs of text is exactly x. */
  const stepOwnRun = (value) => {
    const want = collapse(value);
    return filterBelow((q, el) => {
      if (UNSPOKEN.has(tag(el)) || closest(el, "head") !== null) return false;
      if (tag(el) === "INPUT") return q.text(el) === want && want !== "";
      let run = "";
      for (let c = firstChild(el); c; c = nextSibling(c)) {
        const type = nodeType(c);
        if (type === 3) run += nodeValue(c);
        else if (type === 1) {
          if (run && collapse(run) === want) return true;
          run = "";
        }
      }
      return run !== "" && collapse(run) === want;
    });
  };
  const stepRole = (role, o = {}) => {
    const name = o.name === undefined ? null : matcher(o.name, o.exact);
    const flags = ["checked", "disabled", "expanded", "pressed", "selected", "level"].filter((k) => o[k] !== undefined);
    return filterBelow((q, el) => {
      if (q.role(el) !== role) return false;
      if (!o.includeHidden && q.look.hidden(el)) return false;
      for (const k of flags) if (roleState(el, role, k) !== o[k]) return false;
      if (name === null) return true;
      return name(q.look.hidden(el) ? q.naming.compute(el, role, true).name : q.name(el));
    });
  };
  const roleState = (el, role, k) => {
    const name = tag(el);
    switch (k) {
      case "checked": return checkedState(el, name);
      case "disabled": return isDisabled(el, role);
      case "expanded": return name === "DETAILS" ? hasAttr(el, "open") : attr(el, "aria-expanded") === "true";
      case "pressed": return attr(el, "aria-pressed") === "mixed" ? "mixed" : attr(el, "aria-pressed") === "true";
      case "selected": return name === "OPTION" ? optionSelected(el) : isTrue(attr(el, "aria-selected"));
    }
    return levelOf(el, name);
  };
  const stepLabel = (value, exact) => {
    const match = matcher(value, exact);
    return filterBelow((q, el) => (LABELABLE.has(tag(el)) || hasAttr(el, "aria-label") || hasAttr(el, "aria-labelledby")) && q.labelTexts(el).some(match));
  };
  const stepAttr = (name, value, exact) => {
    const match = matcher(value, exact);
    return filterBelow((q, el) => hasAttr(el, name) && match(collapse(attr(el, name))));
  };
  const stepXPath = (path) => (q, scopes) => gather(q, scopes, (root) => {
    const found = [];
    try {
      const result = Document.prototype.evaluate.call(document, nodeType(root) === 1 && path.startsWith("/") ? "." + path : path, root, null, 7, null);
      for (let i = 0; i < result.snapshotLength; i++) if (nodeType(result.snapshotItem(i)) === 1) found.push(result.snapshotItem(i));
    } catch {
      throw new Failure("bad_selector", JSON.stringify(path) + " is not a valid XPath");
    }
    return found;
  });
  const stepNth = (n) => (q, scopes) => {
    const at = n < 0 ? scopes.length + n : n;
    return at >= 0 && at < scopes.length ? [scopes[at]] : [];
  };
  const stepFilter = (o) => {
    const tests = [];
    if (o.hasText !== undefined) {
      const match = matcher(o.hasText, false);
      tests.push((q, el) => match(q.text(el)));
    }
    if (o.hasNotText !== undefined) {
      const match = matcher(o.hasNotText, false);
      tests.push((q, el) => !match(q.text(el)));
    }
    if (o.has !== undefined) tests.push((q, el) => q.run(o.has.steps, [el]).length > 0);
    if (o.hasNot !== undefined) tests.push((q, el) => q.run(o.hasNot.steps, [el]).length === 0);
    if (o.visible !== undefined) tests.push((q, el) => q.visible(el) === o.visible);
    return (q, scopes) => scopes.filter((el) => tests.every((t) => t(q, el)));
  };

  // --------------------------------------------------------- selectors, parsed
  /** The steps of a selector string; {frame: true, rest} where it enters a frame. */
  const parseSelector = (text) => {
    const steps = [];
    const parts = splitTop(text, ">>");
    for (let i = 0; i < parts.length; i++) {
      const part = parts[i].trim();
      if (/^(internal:control=)?enter-frame$/.test(part)) return { steps, rest: parts.slice(i + 1).join(">>").trim() };
      const step = selectorPart(part);
      if (step) steps.push(...[step].flat());
    }
    if (!steps.length) throw new Failure("bad_selector", "the selector is empty");
    return { steps, rest: null };
  };
  const selectorPart = (part) => {
    if (part === "") return null;
    if (part.startsWith("//") || part.startsWith("..")) return stepXPath(part);
    const m = /^([a-z_][\w:-]*)\s*=\s*([\s\S]*)$/i.exec(part);
    if (!m) return /^(["']).*\1$/.test(part) ? stepOwnRun(unquote(part)) : stepCSS(part);
    const [, engine, body] = m;
    switch (engine) {
      case "css": return stepCSS(body);
      case "xpath": return stepXPath(body);
      case "text": case "internal:text": {
        const re = asRegExp(body);
        if (re) return stepText(re);
        if (/^"[\s\S]*"i$/.test(body)) return stepText(unquote(body.slice(0, -1)));
        if (/^"[\s\S]*"s$/.test(body)) return stepText(unquote(body.slice(0, -1)), true);
        return /^(["'])[\s\S]*\1$/.test(body) ? stepOwnRun(unquote(body)) : stepText(body);
      }
      case "id": return stepCSS("[id=" + JSON.stringify(unquote(body)) + "]");
      case "data-testid": case "data-test-id": case "data-test":
        return stepCSS("[" + engine + "=" + JSON.stringify(unquote(body)) + "]");
      case "nth": return stepNth(Number(body));
      case "visible": return stepFilter({ visible: body === "true" });
      case "role": case "internal:role": return roleSelector(body);
      case "internal:has-text": return stepFilter({ hasText: asRegExp(body) || unquote(body.replace(/[is]$/, "")) });
      case "internal:label": return stepLabel(asRegExp(body) || unquote(body.replace(/[is]$/, "")), body.endsWith("s"));
    }
    throw new Failure("bad_selector", "unknown selector engine " + JSON.stringify(engine));
  };
  const roleSelector = (body) => {
    const m = /^\s*([\w-]+)\s*((?:\[[^\]]*\]\s*)*)$/.exec(body);
    if (!m) throw new Failure("bad_selector", JSON.stringify("role=" + body) + " is not a valid role selector");
    const o = {};
    for (const [, key, , value] of m[2].matchAll(/\[\s*([\w-]+)\s*(=\s*((?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|\/(?:[^/\\]|\\.)*\/|[^\]\s"'])+)\s*([is]?)\s*)?\]/g)) {
      const k = key === "include-hidden" ? "includeHidden" : key;
      if (value === undefined) o[k] = true;
      else if (k === "name") {
        const flagged = /^(["'])[\s\S]*\1([is])$/.exec(value);
        o.name = asRegExp(value) || unquote(flagged ? value.slice(0, -1) : value);
        if (!flagged || flagged[2] === "s") o.exact = true;
      } else o[k] = value === "true" ? true : value === "false" ? false : /^\d+$/.test(value) ? Number(value) : unquote(value);
    }
    return stepRole(m[1], o);
  };
  const unquote = (text) => (/^(["'`])[\s\S]*\1$/.test(text) && text.length > 1 ? text.slice(1, -1).replace(/\\(["'`\\])/g, "$1") : text);
  const asRegExp = (text) => {
    const m = /^\/((?:[^/\\\n]|\\.|\[(?:[^\]\\]|\\.)*\])+)\/([dgimsuvy]*)$/.exec(text.trim());
    if (!m) return null;
    try {
      return new RegExp(m[1], m[2]);
    } catch {
      throw new Failure("bad_selector", text.trim() + " is not a valid regular expression");
    }
  };

  // ---------------------------------------------------- locator expressions
  const LOCATOR = /^(?:await\s+)?(?:page\s*\.\s*)?(?:getBy[A-Z]\w*|locator|frameLocator|filter|first|last|nth)\s*\(/;
  class LocatorParser {
    constructor(text) {
      this.text = text;
      this.at = 0;
    }

    fail(what) {
      throw new Failure("bad_selector", "cannot read locator at character " + (this.at + 1) + ": expected " + what);
    }

    space() {
      while (this.at < this.text.length && /\s/.test(this.text[this.at])) this.at++;
    }

    eat(c) {
      this.space();
      if (!this.text.startsWith(c, this.at)) return false;
      this.at += c.length;
      return true;
    }

    need(c) {
      if (!this.eat(c)) this.fail(JSON.stringify(c));
    }

    word() {
      this.space();
      const m = /[A-Za-z_$][\w$]*/y;
      m.lastIndex = this.at;
      const found = m.exec(this.text);
      if (!found) return "";
      this.at += found[0].length;
      return found[0];
    }

    value() {
      this.space();
      const c = this.text[this.at];
      if (c === "'" || c === '"' || c === "`") return this.string(c);
      if (c === "/") return this.regexp();
      if (c === "{") return this.object();
      const number = /-?\d+(?:\.\d+)?/y;
      number.lastIndex = this.at;
      const n = number.exec(this.text);
      if (n) {
        this.at += n[0].length;
        return Number(n[0]);
      }
      if (LOCATOR.test(this.text.slice(this.at))) {
        const inner = this.chain();
        if (inner.rest !== null) this.fail("a locator inside one document");
        return inner;
      }
      const w = this.word();
      if (w === "true") return true;
      if (w === "false") return false;
      if (w === "undefined" || w === "null") return undefined;
      return this.fail("a value");
    }

    string(quote) {
      let out = "";
      for (this.at++; this.at < this.text.length; this.at++) {
        const c = this.text[this.at];
        if (c === quote) {
          this.at++;
          return out;
        }
        if (c !== "\\") {
          out += c;
          continue;
        }
        const e = this.text[++this.at];
        if (e === "u" || e === "x") {
          const hex = /\{([0-9a-f]{1,6})\}|([0-9a-f]{4})|([0-9a-f]{2})/iy;
          hex.lastIndex = this.at + 1;
          const m = hex.exec(this.text);
          if (!m) this.fail("an escape");
          const digits = m[1] ?? (e === "u" ? m[2] : (m[2] ?? m[3])?.slice(0, 2));
          out += String.fromCodePoint(Math.min(parseInt(digits, 16), 0x10ffff));
          this.at += m[1] ? m[0].length : digits.length;
        } else out += { n: "\n", t: "\t", r: "\r", b: "\b", f: "\f", "\n": "" }[e] ?? e;
      }
      return this.fail("the end of the string");
    }

    regexp() {
      const m = /\/(?:[^/\\\n[]|\\.|\[(?:[^\]\\\n]|\\.)*\])+\/[dgimsuvy]*/y;
      m.lastIndex = this.at;
      const found = m.exec(this.text);
      if (!found) this.fail("a regular expression");
      this.at += found[0].length;
      return asRegExp(found[0]);
    }

    object() {
      const out = {};
      this.need("{");
      while (!this.eat("}")) {
        this.space();
        const c = this.text[this.at];
        const key = c === "'" || c === '"' ? this.string(c) : this.word();
        if (!key) this.fail("a name");
        this.need(":");
        out[key] = this.value();
        if (!this.eat(",")) {
          this.need("}");
          break;
        }
      }
      return out;
    }

    args() {
      const out = [];
      this.need("(");
      while (!this.eat(")")) {
        out.push(this.value());
        if (!this.eat(",")) {
          this.need(")");
          break;
        }
      }
      return out;
    }

    /** {steps, rest, upto}: rest is the source after contentFrame(), upto the source before it. */
    chain() {
      this.space();
      const from = this.at;
      if (/^await\s/.test(this.text.slice(this.at))) this.word();
      const start = this.at;
      if (this.word() !== "page" || !this.eat(".")) this.at = start;
      const steps = [];
      for (;;) {
        this.space();
        const before = this.at;
        const name = this.word();
        if (!name) this.fail("a locator method");
        if (name === "contentFrame" || name === "frameLocator") {
          const args = this.args();
          let upto = this.text.slice(from, before).replace(/\.\s*$/, "");
          if (name === "frameLocator") {
            const css = args[0];
            if (typeof css !== "string") this.fail("a selector");
            steps.push(...parseSelector(css).steps);
            upto = (upto ? upto + "." : "") + "locator(" + codeString(css) + ")";
          }
          // Which of several frames is asked is said after the call.
          while (/^\s*\.\s*(?:first|last|nth|owner)\s*\(/.test(this.text.slice(this.at))) {
            this.need(".");
            const which = this.word();
            const a = this.args();
            if (which === "owner") this.fail("a locator inside the frame");
            steps.push(stepNth(which === "first" ? 0 : which === "last" ? -1 : Number(a[0])));
            upto += which === "first" ? ".first()" : which === "last" ? ".last()" : ".nth(" + a[0] + ")";
          }
          if (!this.eat(".")) this.fail("a locator inside the frame");
          return { steps, rest: this.text.slice(this.at), upto };
        }
        this.step(name, this.args(), steps);
        if (!this.eat(".")) return { steps, rest: null };
      }
    }

    step(name, args, steps) {
      const [a, o = {}] = args;
      const text = () => {
        if (typeof a !== "string" && !(a instanceof RegExp)) this.fail("a text for " + name);
        return a;
      };
      switch (name) {
        case "getByRole":
          if (typeof a !== "string") this.fail("a role");
          steps.push(stepRole(a, o));
          return;
        case "getByText": steps.push(stepText(text(), o.exact)); return;
        case "getByLabel": steps.push(stepLabel(text(), o.exact)); return;
        case "getByPlaceholder": steps.push(stepAttr("placeholder", text(), o.exact)); return;
        case "getByAltText": steps.push(stepAttr("alt", text(), o.exact)); return;
        case "getByTitle": steps.push(stepAttr("title", text(), o.exact)); return;
        case "getByTestId": steps.push(stepAttr("data-testid", text(), true)); return;
        case "locator":
          if (typeof a === "string") {
            const inner = parseSelector(a);
            if (inner.rest !== null) this.fail("a selector inside one document");
            steps.push(...inner.steps);
          } else if (a && a.steps) steps.push(...a.steps);
          else this.fail("a selector");
          if (args.length > 1) steps.push(stepFilter(o));
          return;
        case "filter": steps.push(stepFilter(a || {})); return;
        case "first": steps.push(stepNth(0)); return;
        case "last": steps.push(stepNth(-1)); return;
        case "nth":
          if (!Number.isInteger(a)) this.fail("a number");
          steps.push(stepNth(a));
          return;
        case "and":
        case "or": {
          if (!a || !a.steps) this.fail("a locator");
          const left = steps.splice(0);
          steps.push((q, scopes) => {
            const l = left.reduce((found, s) => s(q, found), scopes);
            const r = new Set(q.run(a.steps));
            return name === "and" ? l.filter((el) => r.has(el)) : inOrder(unique([...l, ...r]));
          });
          return;
        }
        case "describe": return;
      }
      this.fail("a locator method instead of " + name);
    }
  }

  /** {steps, rest, upto} of a selector or locator expression. */
  const parseTarget = (source) => {
    const text = source.trim();
    if (LOCATOR.test(text)) {
      const p = new LocatorParser(text.replace(/;$/, ""));
      const chain = p.chain();
      if (chain.rest === null) {
        p.space();
        if (p.at < p.text.length) p.fail("the end");
      }
      return chain;
    }
    const parsed = parseSelector(text);
    if (parsed.rest !== null) parsed.upto = "locator(" + codeString(text.slice(0, text.lastIndexOf(parsed.rest)).replace(/>>\s*(internal:control=)?enter-frame\s*>>\s*$/, "").trim()) + ")";
    return parsed;
  };

  const NO_FRAME = "the target leads into a frame; it must be resolved first";
  /** The element of a target, with the query that may be used further. */
  const find = (target, strict = true) => {
    if (target instanceof Element) return target;
    target = String(target);
    if (REF.test(target)) return fromRef(target);
    if (/^h\d+$/.test(target)) {
      const el = byHandle.get(Number(target.slice(1)))?.deref();
      if (el && isConnected(el)) return el;
      throw new Failure("detached", "the element has left the document");
    }
    const { steps, rest } = parseTarget(target);
    if (rest !== null) throw new Failure("bad_selector", NO_FRAME);
    return pick(steps, target, strict);
  };
  const pick = (steps, target, strict) => {
    const q = new Query();
    const found = q.run(steps);
    if (!found.length) throw new Failure("not_found", JSON.stringify(target) + " does not match any elements");
    if (strict && found.length > 1) {
      const candidates = found.slice(0, 10).map((el) => {
        const role = q.role(el) || "generic";
        return { ref: refText(el), role, name: q.name(el).slice(0, 200), locator: locatorFor(el, q) };
      });
      throw new Failure("ambiguous", JSON.stringify(target) + " matches " + found.length + " elements", { candidates });
    }
    return found[0];
  };

  // ------------------------------------------------------- locators, generated
  const codeString = (text) => "'" + text.replace(/\\/g, "\\\\").replace(/'/g, "\\'").replace(/\n/g, "\\n").replace(/\r/g, "\\r") + "'";
  const MAX_WORDS = 80;
  /** A text short enough for code: the whole, or what fits up to a word's end. */
  const shorten = (text) => {
    if (text.length <= MAX_WORDS) return text;
    const cut = text.lastIndexOf(" ", 30);
    return text.slice(0, cut > 0 ? cut : 30).toWellFormed();
  };
  const cssString = (text) => '"' + text.replace(/["\\]/g, "\\$&").replace(/\n/g, "\\a ") + '"';

  /** Ways to say where an element is, best first: {code, steps, exact?}. */
  const candidatesFor = (el, q) => {
    const out = [];
    const name = tag(el);
    const add = (code, ...steps) => out.push({ code, steps });
    const testId = attr(el, "data-testid");
    if (testId) add("getByTestId(" + codeString(testId) + ")", stepAttr("data-testid", testId, true));
    if (name === "IFRAME") {
      for (const key of ["name", "title"]) {
        const value = attr(el, key);
        if (value) {
          const css = "iframe[" + key + "=" + cssString(value) + "]";
          add("locator(" + codeString(css) + ")", stepCSS(css));
        }
      }
    }
    const role = q.role(el);
    const named = role && role !== "none" && role !== "presentation" && role !== "iframe";
    const both = (fn, text, step) => {
      const short = shorten(text);
      add(fn + "(" + codeString(short) + ")", step(short, false));
      if (short === text) add(fn + "(" + codeString(short) + ", { exact: true })", step(short, true));
    };
    const accName = named ? q.name(el) : "";
    if (named && accName && name !== "SELECT") {
      const short = shorten(accName);
      const r = codeString(role);
      add("getByRole(" + r + ", { name: " + codeString(short) + " })", stepRole(role, { name: short }));
      if (short === accName) add("getByRole(" + r + ", { name: " + codeString(short) + ", exact: true })", stepRole(role, { name: short, exact: true }));
    }
    const placeholder = name === "INPUT" || name === "TEXTAREA" ? attr(el, "placeholder") : null;
    if (placeholder && collapse(placeholder)) both("getByPlaceholder", collapse(placeholder), (t, exact) => stepAttr("placeholder", t, exact));
    if (LABELABLE.has(name)) for (const text of q.labelTexts(el)) if (text) both("getByLabel", text, stepLabel);
    const alt = name === "IMG" || name === "AREA" || name === "INPUT" ? attr(el, "alt") : null;
    if (alt && collapse(alt)) both("getByAltText", collapse(alt), (t, exact) => stepAttr("alt", t, exact));
    if (name !== "SELECT" && name !== "INPUT" && name !== "TEXTAREA" && name !== "BODY" && name !== "HTML") {
      const text = q.text(el);
      if (text && q.hasOwnText(el, matcher(shorten(text)))) both("getByText", text, stepText);
    }
    const title = attr(el, "title");
    if (title && collapse(title)) both("getByTitle", collapse(title), (t, exact) => stepAttr("title", t, exact));
    const id = attr(el, "id");
    if (id && steady(id)) {
      const css = "#" + CSS.escape(id);
      add("locator(" + codeString(css) + ")", stepCSS(css));
    }
    if (named) add("getByRole(" + codeString(role) + ")", stepRole(role));
    const lower = tagOf(el).toLowerCase();
    const type = name === "INPUT" || name === "TEXTAREA" ? attr(el, "type") : null;
    const field = attr(el, "name");
    if (field && /^(BUTTON|FORM|FIELDSET|INPUT|OBJECT|OUTPUT|SELECT|TEXTAREA|MAP|META|PARAM)$/.test(name)) {
      const css = lower + "[name=" + cssString(field) + "]";
      add("locator(" + codeString(css) + ")", stepCSS(css));
    }
    if (type) {
      const css = lower + "[type=" + cssString(type) + "]";
      add("locator(" + codeString(css) + ")", stepCSS(css));
    }
    if (/^[a-z][a-z0-9-]*$/.test(lower)) add("locator(" + codeString(lower) + ")", stepCSS(lower));
    return out;
  };
  /** Ids that a program counted up or hashed say nothing tomorrow. */
  const steady = (id) => {
    let changes = 0;
    let last = "";
    for (const c of id) {
      const kind = /[a-z]/.test(c) ? "a" : /[A-Z]/.test(c) ? "A" : /\d/.test(c) ? "0" : "-";
      if (kind !== "-" && last !== "" && kind !== last && !(last === "A" && kind === "a")) changes++;
      if (kind !== "-") last = kind;
    }
    return changes < id.length / 4;
  };
  const isOnly = (q, steps, el) => {
    const found = q.run(steps);
    return found.length === 1 && found[0] === el;
  };

  // Roles of which there are many alike, told apart by what is written in them.
  const TOLD_BY_TEXT = /^(listitem|row|article|group|dialog|region)$/;
  /** Playwright code that finds exactly this element. */
  const locatorFor = (el, q) => {
    const own = candidatesFor(el, q);
    for (const c of own) if (isOnly(q, c.steps, el)) return c.code;
    const byText = (e) => {
      const role = q.role(e);
      const text = TOLD_BY_TEXT.test(role) ? shorten(q.text(e)) : "";
      return text ? { code: "getByRole(" + codeString(role) + ").filter({ hasText: " + codeString(text) + " })", steps: [stepRole(role), stepFilter({ hasText: text })] } : null;
    };
    const self = byText(el);
    if (self && isOnly(q, self.steps, el)) return self.code;
    // Below an ancestor that can be told.
    const unnamed = own.filter((c) => /^getByRole\('[\w-]+'\)$/.test(c.code));
    for (let up = parentOf(el), far = 0; up && far < 12; up = parentOf(up), far++) {
      if (tag(up) === "BODY" || tag(up) === "HTML") break;
      const above = candidatesFor(up, q).filter((c) => !/^getByText\(/.test(c.code));
      const told = byText(up);
      for (const a of told ? [...above, told] : above) {
        if (!isOnly(q, a.steps, up)) continue;
        // The text that tells the ancestor says the name of what is in it.
        for (const c of a === told ? [...unnamed, ...own] : own) if (isOnly(q, [...a.steps, ...c.steps], el)) return a.code + "." + c.code;
        break;
      }
    }
    // Else by number.
    for (const c of own) {
      const at = q.run(c.steps).indexOf(el);
      if (at >= 0 && at < 50) return c.code + (at === 0 ? ".first()" : ".nth(" + at + ")");
    }
    return "locator(" + codeString(cssPath(el)) + ")";
  };
  /** A selector from the nearest id or the root of its tree down, by positions. */
  const cssPath = (el) => {
    const path = [];
    for (let e = el; e; e = parentElement(e)) {
      const id = attr(e, "id");
      const root = getRootNode(e);
      if (id && nodeType(root) !== 1 && queryAll(root, "#" + CSS.escape(id)).length === 1) {
        path.unshift("#" + CSS.escape(id));
        break;
      }
      const name = CSS.escape(tagOf(e).toLowerCase());
      let n = 1;
      let same = 1;
      for (let s = previousSibling(e); s; s = previousSibling(s)) if (tagOf(s) === tagOf(e)) n++;
      for (let s = nextElement(e); s; s = nextElement(s)) if (tagOf(s) === tagOf(e)) same++;
      path.unshift(n === 1 && same === 1 ? name : name + ":nth-of-type(" + n + ")");
    }
    return path.join(" > ");
  };

  const callersCode = (source) => {
    const target = source.trim();
    if (!LOCATOR.test(target)) return "locator(" + codeString(target) + ")";
    return target.replace(/;$/, "").replace(/^await\s+/, "").replace(/^page\s*\.\s*/, "");
  };
  const describeWith = (el, q, locator) => ({
    handle: handleFor(el), ref: refText(el), role: q.role(el) || "generic", name: q.name(el).slice(0, 1000), locator: locator === undefined ? locatorFor(el, q) : locator,
  });
  const located = (target, el) => {
    const generated = typeof target !== "string" || REF.test(target) || /^h\d+$/.test(target);
    return describeWith(el, new Query(), generated ? undefined : callersCode(target));
  };
  const kindOf = (el) => {
    const q = new Query();
    return "<" + tagOf(el).toLowerCase() + "> " + say(q.role(el) || "generic", q.name(el));
  };

  // ------------------------------------------------------------ actionability
  // rAF does not come in a page that is not painted: a timer stands in for it.
  const frame = (limit = 100) => new Promise((resolve) => {
    let id = 0;
    const timer = setTimeout(() => {
      cancelAnimationFrame(id);
      resolve(false);
    }, limit);
    id = requestAnimationFrame(() => {
      clearTimeout(timer);
      resolve(true);
    });
  });
  const sameRect = (a, b) => a.x === b.x && a.y === b.y && a.width === b.width && a.height === b.height;
  /** Retries attempt() until it succeeds, fails for good, or the time is over. */
  const patiently = async (timeout, attempt) => {
    const end = performance.now() + (timeout ?? 5000);
    for (let pause = 0, tries = 0; ; tries++) {
      let failure;
      try {
        return await attempt(tries);
      } catch (e) {
        if (!(e instanceof Failure) || !RETRY.has(e.answer.error.code)) throw e;
        failure = e;
      }
      const left = end - performance.now();
      if (left <= 0) throw failure;
      pause = Math.min(pause ? pause * 2 : 16, 250);
      await change(Math.min(pause, left));
    }
  };
  const RETRY = new Set(["not_visible", "not_stable", "disabled", "obstructed", "outside_viewport", "readonly"]);
  /** Waits for a mutation of the document, at most so long: what is watched may also change without one. */
  const change = (limit) => new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      observer.disconnect();
      resolve();
    };
    const observer = new MutationObserver(done);
    const timer = setTimeout(done, limit);
    observer.observe(document, { subtree: true, childList: true, characterData: true, attributes: true });
  });

  const mustShow = (el, look) => {
    const name = tag(el);
    if (name === "OPTION" || name === "OPTGROUP") {
      const list = closest(el, "select");
      if (list && !look.box(el).visible) throw new Failure("not_visible", kindOf(el) + " is inside a closed list; select it with browser_select_option on the list");
    }
    const f = look.box(el);
    if (f.display === "contents" ? !f.visible : !f.shown) throw new Failure("not_visible", kindOf(el) + " is not visible");
    if (!f.visible) throw new Failure("not_visible", kindOf(el) + " has no size");
  };
  const mustBeEnabled = (el) => {
    if (isDisabled(el, roleOf(el))) throw new Failure("disabled", kindOf(el) + " is disabled");
  };
  const viewport = () => ({ width: innerWidth, height: innerHeight });
  /** The parts of the element inside the viewport. */
  const shownRects = (el) => {
    const { width, height } = viewport();
    const out = [];
    let rects = Element.prototype.getClientRects.call(el);
    if (!rects.length) { // display: contents
      const range = document.createRange();
      range.selectNodeContents(el);
      rects = range.getClientRects();
    }
    for (let i = 0; i < rects.length && i < 100; i++) {
      const r = rects[i];
      const x = Math.max(r.left, 0);
      const y = Math.max(r.top, 0);
      const w = Math.min(r.right, width) - x;
      const h = Math.min(r.bottom, height) - y;
      if (w > 0 && h > 0 && w * h > 0.99) out.push({ x, y, width: w, height: h });
    }
    return out;
  };
  const ALIGN = ["nearest", "center", "end", "start"];
  const scrollTo = (el, tries) => {
    const block = ALIGN[tries % ALIGN.length];
    Element.prototype.scrollIntoView.call(el, { block, inline: block === "center" ? "center" : "nearest", behavior: "instant" });
  };
  /** The innermost element at a point, through open shadow roots. */
  const hitAt = (x, y) => {
    let hit = Document.prototype.elementFromPoint.call(document, x, y);
    for (let i = 0; hit && i < 100; i++) {
      const shadow = shadowRootOf(hit);
      const inner = shadow ? ShadowRoot.prototype.elementFromPoint.call(shadow, x, y) : null;
      if (!inner || inner === hit) break;
      hit = inner;
    }
    return hit;
  };
  const isInside = (node, el) => {
    for (let n = node, i = 0; n && i < 10000; n = flatParent(n), i++) if (n === el) return true;
    for (let n = node, i = 0; n && i < 10000; n = parentOf(n), i++) if (n === el) return true;
    return false;
  };
  /** Whether a press that lands on hit is one on el. */
  const receives = (hit, el) => {
    if (isInside(hit, el)) return true;
    // A closed shadow root shows only its host.
    for (let root = getRootNode(el), i = 0; root instanceof ShadowRoot && i < 100; root = getRootNode(hostOf(root)), i++) {
      if (hit === hostOf(root)) return true;
    }
    if (labelsOf(el).some((label) => isInside(hit, label))) return true;
    const label = closest(el, "label");
    const control = label ? getter(HTMLLabelElement.prototype, "control").call(label) : null;
    return control !== null && label === el && isInside(hit, control);
  };
  const mustReceive = (el, x, y) => {
    const hit = hitAt(x, y);
    // No answer is no obstruction: the press goes where it is aimed.
    if (hit === null || receives(hit, el)) return;
    let shown = hit;
    const q = new Query();
    // What is named says more than the icon inside it.
    for (let up = hit, i = 0; up && i < 5; up = flatParent(up), i++) {
      if (isInside(el, up)) break;
      if (q.role(up) && q.name(up)) {
        shown = up;
        break;
      }
    }
    const role = q.role(shown) || "generic";
    const name = q.name(shown);
    const receiver = { role, name: name.slice(0, 200), tag: tagOf(shown).toLowerCase(), ref: refText(shown), locator: locatorFor(shown, q) };
    const own = !new Look().of(el).presses ? " (it takes no pointer events itself)" : "";
    throw new Failure("obstructed", "<" + receiver.tag + "> " + say(role, name) + (receiver.ref ? " [ref=" + receiver.ref + "]" : "") +
      " would receive the press instead of " + kindOf(el) + own, { receiver });
  };

  const point = async (target, o = {}) => {
    const el = find(target);
    const start = [scrollX, scrollY];
    let moved = false;
    const at = await patiently(o.timeout, async (tries) => {
      mustBeThere(el);
      mustShow(el, new Look());
      mustBeEnabled(el);
      const aim = () => {
        if (o.position) {
          const r = rectOf(el);
          const x = r.x + o.position.x;
          const y = r.y + o.position.y;
          const { width, height } = viewport();
          return x >= 0 && y >= 0 && x < width && y < height ? { x, y } : null;
        }
        const [r] = shownRects(el);
        return r ? { x: r.x + r.width / 2, y: r.y + r.height / 2 } : null;
      };
      let to = aim();
      if (to && !o.force) {
        const hit = hitAt(to.x, to.y);
        if (tries > 0 && hit !== null && !receives(hit, el)) {
          scrollTo(el, tries);
          moved = true;
        }
      } else if (!to) {
        scrollTo(el, tries === 0 ? 1 : tries);
        moved = true;
      }
      if (!o.force) {
        const before = rectOf(el);
        await frame();
        mustBeThere(el);
        if (!sameRect(before, rectOf(el))) throw new Failure("not_stable", kindOf(el) + " keeps moving");
      }
      to = aim();
      if (!to) throw new Failure("outside_viewport", kindOf(el) + " cannot be scrolled into the viewport");
      if (!o.force) mustReceive(el, to.x, to.y);
      return to;
    });
    const r = rectOf(el);
    return {
      x: at.x, y: at.y, scrolled: moved || start[0] !== scrollX || start[1] !== scrollY,
      rect: { x: r.x, y: r.y, width: r.width, height: r.height }, ...located(target, el),
    };
  };
  const mustBeThere = (el) => {
    if (!isConnected(el)) throw new Failure("detached", "the element has left the document");
  };

  // -------------------------------------------------------------------- fields
  const SET_TYPES = new Set(["color", "date", "time", "datetime-local", "month", "range", "week"]);
  const NO_TEXT = {
    checkbox: "a checkbox, which is clicked", radio: "a radio button, which is clicked", file: "a file field, which takes files",
    button: "a button", submit: "a button", reset: "a button", image: "a button", hidden: "hidden",
  };
  const setValue = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set;
  const editable = read(HTMLElement.prototype, "isContentEditable");
  const deepActive = () => {
    let el = activeElementOf(document);
    for (let i = 0; el && i < 100; i++) {
      const shadow = shadowRootOf(el);
      const inner = shadow ? shadowActive(shadow) : null;
      if (!inner) break;
      el = inner;
    }
    return el;
  };
  const fire = (el, type) => EventTarget.prototype.dispatchEvent.call(el, new Event(type, { bubbles: true, composed: true }));
  /** The field a target means: a label means its control. */
  const fieldOf = (el) => {
    if (tag(el) === "LABEL") {
      const control = getter(HTMLLabelElement.prototype, "control").call(el);
      if (control) return control;
    }
    return el;
  };
  /** Checks that text can go into the field. */
  const mustTakeText = (el) => {
    const name = tag(el);
    if (name === "INPUT" && NO_TEXT[inputType(el)]) throw new Failure("not_editable", kindOf(el) + " is " + NO_TEXT[inputType(el)] + " and takes no text");
    if (name === "SELECT") throw new Failure("not_editable", kindOf(el) + " is a list; choose from it with browser_select_option");
    if (name !== "INPUT" && name !== "TEXTAREA" && !(el instanceof HTMLElement && editable(el))) {
      throw new Failure("not_editable", kindOf(el) + " is not an input, a textarea or a contenteditable element");
    }
    mustShow(el, new Look());
    mustBeEnabled(el);
    if (((name === "INPUT" || name === "TEXTAREA") && hasAttr(el, "readonly")) || isTrue(attr(el, "aria-readonly"))) {
      throw new Failure("readonly", kindOf(el) + " is read-only");
    }
  };
  const focusOn = (el) => {
    const host = el instanceof HTMLElement && editable(el) ? editingHost(el) : el;
    if (deepActive() !== host) HTMLElement.prototype.focus.call(host, { preventScroll: false });
    if (deepActive() !== host) throw new Failure("not_editable", kindOf(el) + " does not keep the focus");
  };
  const editingHost = (el) => {
    let host = el;
    for (let up = parentElement(el); up && up instanceof HTMLElement && editable(up); up = parentElement(up)) host = up;
    return host;
  };
  const selectAll = (el, collapseToEnd) => {
    const name = tag(el);
    if (name === "INPUT" || name === "TEXTAREA") {
      (name === "INPUT" ? HTMLInputElement : HTMLTextAreaElement).prototype.select.call(el);
      if (!collapseToEnd) return;
      try {
        const end = valueOf[name](el).length;
        (name === "INPUT" ? HTMLInputElement : HTMLTextAreaElement).prototype.setSelectionRange.call(el, end, end);
      } catch {
        // email and number fields have no selection to move: the caret is at the end then
      }
      return;
    }
    const selection = getSelection();
    selection.selectAllChildren(el);
    if (collapseToEnd) selection.collapseToEnd();
  };
  const prepare = async (target, o, then) => {
    const el = fieldOf(find(target));
    const answer = await patiently(o?.timeout, async () => {
      mustBeThere(el);
      mustTakeText(el);
      return then(el);
    });
    return { ...answer, ...located(target, el) };
  };
  const prepareFill = (target, text, o) => prepare(target, o, (el) => {
    const type = tag(el) === "INPUT" ? inputType(el) : "";
    if (SET_TYPES.has(type)) {
      const want = type === "color" ? text.toLowerCase() : text.trim();
      focusOn(el);
      const had = valueOf.INPUT(el);
      setValue.call(el, want);
      if (valueOf.INPUT(el) !== want) {
        setValue.call(el, had);
        throw new Failure("bad_value", JSON.stringify(text) + " is no value for a field of type " + type + (FORMAT[type] ? ", which wants " + FORMAT[type] : ""));
      }
      fire(el, "input");
      fire(el, "change");
      return { kind: "done" };
    }
    if (type === "number" && text.trim() !== "" && Number.isNaN(Number(text))) {
      throw new Failure("bad_value", JSON.stringify(text) + " is not a number, and " + kindOf(el) + " takes only numbers");
    }
    focusOn(el);
    selectAll(el, false);
    return { kind: "insert" };
  });
  const FORMAT = {
    date: "YYYY-MM-DD", time: "HH:MM", "datetime-local": "YYYY-MM-DDTHH:MM", month: "YYYY-MM", week: "YYYY-Www", color: "#rrggbb", range: "a number in its range and step",
  };
  const prepareType = (target, o) => prepare(target, o, (el) => {
    const had = deepActive() === el;
    focusOn(el);
    if (!had) selectAll(el, true);
    return { kind: "insert" };
  });

  const selectOption = async (target, values, o) => {
    const el = fieldOf(find(target));
    if (tag(el) !== "SELECT") throw new Failure("not_editable", kindOf(el) + " is not a <select> element");
    const chosen = await patiently(o?.timeout, async () => {
      mustBeThere(el);
      mustShow(el, new Look());
      mustBeEnabled(el);
      const options = Array.from(selectOptions(el));
      const want = selectMultiple(el) ? values : values.slice(0, 1);
      const found = want.map((value) => {
        const option = options.find((x) => optionValue(x) === value) || options.find((x) => collapse(optionLabel(x)) === collapse(value));
        if (!option) throw new Failure("bad_value", kindOf(el) + " has no option " + JSON.stringify(value) + "; it has " + options.slice(0, 20).map((x) => JSON.stringify(collapse(optionLabel(x)))).join(", "));
        if (nativelyDisabled(option)) throw new Failure("disabled", kindOf(option) + " is disabled");
        return option;
      });
      const set = Object.getOwnPropertyDescriptor(HTMLOptionElement.prototype, "selected").set;
      if (deepActive() !== el) HTMLElement.prototype.focus.call(el);
      for (const option of options) if (selectMultiple(el) || found.length === 0) set.call(option, false);
      for (const option of found) set.call(option, true);
      fire(el, "input");
      fire(el, "change");
      return found.map(optionValue);
    });
    return { selected: chosen, ...located(target, el) };
  };

  // -------------------------------------------------------------------- waits
  const waitForText = (text, o = {}) => {
    const match = matcher(text, false);
    const met = () => {
      const body = bodyOf(document);
      if (!body) return !!o.gone;
      const q = new Query();
      const shown = match(q.text(body)) && q.below(body).concat([body]).some((el) => q.hasOwnText(el, match) && q.visible(el));
      return shown !== !!o.gone;
    };
    if (met()) return Promise.resolve({ met: true });
    return new Promise((resolve) => {
      const events = ["transitionend", "animationend", "load", "resize", "toggle"];
      const options = { subtree: true, childList: true, characterData: true, attributes: true };
      let due = 0;
      let last = performance.now();
      const finish = (answer) => {
        clearTimeout(end);
        clearTimeout(due);
        clearInterval(slow);
        observer.disconnect();
        for (const e of events) removeEventListener(e, soon, true);
        resolve({ met: answer });
      };
      const check = () => {
        due = 0;
        const began = performance.now();
        if (met()) finish(true);
        last = performance.now();
        cost = last - began;
        for (const root of shadowRoots()) observer.observe(root, options);
      };
      let cost = 0;
      // A page that changes all the time is looked at often, not all the time.
      const soon = () => {
        if (!due) due = setTimeout(check, Math.max(0, Math.max(16, cost * 4) - (performance.now() - last)));
      };
      const shadowRoots = () => Array.from(queryAll(document, "*")).map(shadowRootOf).filter((r) => r !== null);
      const observer = new MutationObserver(soon);
      observer.observe(document, options);
      for (const root of shadowRoots()) observer.observe(root, options);
      for (const e of events) addEventListener(e, soon, true);
      // Style rules and media queries change what is visible without an event.
      const slow = setInterval(soon, 250);
      const end = setTimeout(() => finish(met()), o.timeout ?? 5000);
    });
  };
  const frames = async (n = 2, limit = 250) => {
    const end = performance.now() + limit;
    for (let i = 0; i < n; i++) {
      const left = end - performance.now();
      if (left <= 0 || !(await frame(left))) return { painted: false };
    }
    return { painted: true };
  };
  const watches = new Map();
  let lastWatch = 0;
  const watch = () => {
    const w = { seen: false, observer: null };
    w.observer = new MutationObserver(() => {
      w.seen = true;
      w.observer.disconnect();
    });
    w.observer.observe(document, { subtree: true, childList: true, characterData: true, attributes: true });
    watches.set(++lastWatch, w);
    if (watches.size > 16) {
      const [oldest] = watches.keys();
      watches.get(oldest).observer.disconnect();
      watches.delete(oldest);
    }
    return lastWatch;
  };
  const changed = (id) => {
    const w = watches.get(id);
    if (!w) return true;
    const yes = w.seen || w.observer.takeRecords().length > 0;
    if (yes) {
      w.observer.disconnect();
      watches.delete(id);
    }
    return yes;
  };

  // ------------------------------------------------------------- what is called
  /** Turns the failures that a page or caller can cause into answers. */
  const answering = (fn) => (...args) => {
    const caught = (e) => {
      if (e instanceof Failure) return e.answer;
      throw e;
    };
    try {
      const out = fn(...args);
      return out instanceof Promise ? out.catch(caught) : out;
    } catch (e) {
      return caught(e);
    }
  };

  const abf = {
    version: VERSION,

    snapshot: answering((o = {}) => {
      if (prefix === null) prefix = o.prefix || "";
      const root = o.target ? find(o.target) : rootOf();
      if (!root) return { text: "", lines: 0, frames: [], cut: null };
      for (let surplus = 2.5; ; surplus *= 4) {
        const walk = new Walk(root, o, surplus);
        const answer = walk.render();
        // Less was left of it than expected: go further.
        if (walk.stopped && walk.bytes < walk.max * 0.8 && walk.lost.lines === 0) continue;
        return answer;
      }
    }),

    resolve: answering((target, o = {}) => {
      const strict = o.strict !== false;
      if (!REF.test(target) && !/^h\d+$/.test(target)) {
        const parsed = parseTarget(target);
        if (parsed.rest !== null) {
          const el = pick(parsed.steps, target, strict);
          if (tag(el) !== "IFRAME" && tag(el) !== "FRAME") throw new Failure("not_found", kindOf(el) + " is not a frame");
          return { frame: { handle: handleFor(el), locator: callersCode(parsed.upto), rest: parsed.rest } };
        }
      }
      return located(target, find(target, strict));
    }),

    element: (target) => {
      try {
        return find(target);
      } catch (e) {
        if (e instanceof Failure) return null;
        throw e;
      }
    },

    describe: answering((target) => describeWith(find(target), new Query())),
    describeElement: answering((el) => describeWith(el, new Query())),
    point: answering(point),
    hit: answering((target, x, y) => {
      const el = find(target);
      mustReceive(el, x, y);
      return { ok: true };
    }),

    frameOffset: answering((target, at) => {
      const el = find(target);
      mustShow(el, new Look());
      const into = () => {
        const r = rectOf(el);
        // A transform scales what is inside; the box knows its own size.
        const w = read(HTMLElement.prototype, "offsetWidth")(el) || r.width;
        const h = read(HTMLElement.prototype, "offsetHeight")(el) || r.height;
        const style = getComputedStyle(el);
        const left = read(Element.prototype, "clientLeft")(el) + parseFloat(style.paddingLeft || "0");
        const top = read(Element.prototype, "clientTop")(el) + parseFloat(style.paddingTop || "0");
        return { x: r.x + ((left + at.x) * r.width) / w, y: r.y + ((top + at.y) * r.height) / h };
      };
      const inView = (p) => p.x >= 0 && p.y >= 0 && p.x < innerWidth && p.y < innerHeight;
      let p = into();
      for (let tries = 1; !inView(p) && tries < 4; tries++) {
        scrollTo(el, tries);
        p = into();
      }
      if (!inView(p)) {
        // A frame taller than the window: bring the point itself into view.
        scrollBy({ left: p.x - innerWidth / 2, top: p.y - innerHeight / 2, behavior: "instant" });
        p = into();
      }
      if (!inView(p)) throw new Failure("outside_viewport", kindOf(el) + " cannot be scrolled so that the point is in the viewport");
      mustReceive(el, p.x, p.y);
      return p;
    }),

    rect: answering(async (target, o = {}) => {
      const el = find(target);
      mustShow(el, new Look());
      if (o.scroll !== false) {
        scrollTo(el, 0);
        await frame();
        mustBeThere(el);
      }
      const r = rectOf(el);
      return { x: r.x, y: r.y, width: r.width, height: r.height, pageX: r.x + scrollX, pageY: r.y + scrollY, dpr: devicePixelRatio, ...located(target, el) };
    }),

    prepareFill: answering(prepareFill),
    prepareType: answering(prepareType),
    selectOption: answering(selectOption),
    checked: answering((target) => {
      const el = fieldOf(find(target));
      return { checked: checkedState(el, tag(el)) === true, ...located(target, el) };
    }),

    active: answering(() => {
      const el = deepActive();
      if (!el || !Document.prototype.hasFocus.call(document)) return null;
      const q = new Query();
      const name = tag(el);
      const field = name === "INPUT" || name === "TEXTAREA";
      const role = q.role(el) || "generic";
      return {
        tag: name.toLowerCase(), role, name: q.name(el).slice(0, 1000), ref: refText(el), frame: name === "IFRAME" || name === "FRAME",
        editable: (field && !(name === "INPUT" && NO_TEXT[inputType(el)])) || (el instanceof HTMLElement && editable(el)),
        readonly: field && hasAttr(el, "readonly"), disabled: isDisabled(el, role),
      };
    }),

    waitForText: answering(waitForText),
    frames: answering(frames),
    watch,
    changed,

    page: () => {
      const scroller = getter(Document.prototype, "scrollingElement").call(document);
      return {
        url: location.href, title: wellFormed(getter(Document.prototype, "title").call(document)), readyState: getter(Document.prototype, "readyState").call(document),
        timeOrigin: performance.timeOrigin, focused: Document.prototype.hasFocus.call(document), dpr: devicePixelRatio,
        viewport: { width: innerWidth, height: innerHeight }, scroll: { x: scrollX, y: scrollY },
        content: { width: scroller ? read(Element.prototype, "scrollWidth")(scroller) : innerWidth, height: scroller ? read(Element.prototype, "scrollHeight")(scroller) : innerHeight },
      };
    },
  };
  Object.defineProperty(globalThis, "abf", { value: Object.freeze(abf), configurable: false, writable: false });
  return abf;
})()
