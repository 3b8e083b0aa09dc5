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
 *     stale_ref        the ref is unknown here, its element left the document, or it changed role or name
 *     not_found        a selector or locator matched nothing
 *     ambiguous        it matched several; candidates: [{ref, role, name, locator}] (first 10), message has the count
 *     bad_selector     the selector or locator expression cannot be parsed; message says where
 *     not_visible, not_stable, disabled, obstructed, outside_viewport, detached   from point and friends
 *     readonly, not_editable, bad_value                                            from prepareFill, selectOption
 * message is a cause without a capital or period ("<button> Save is disabled"), ready for fault.New.
 *
 * TARGET, wherever a function takes one, is a string:
 *     a ref            "e5", "f2e5": the document knows its own prefix (set by the first snapshot), another prefix is stale_ref
 *     a handle         "h12", as answered by an earlier call in the same document; the last 256 stay valid
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
 * snapshot({target?, depth?, boxes?, prefix?, maxBytes?, roles?})
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
 * point(target, {timeout = 5000, force = false, position?: {x, y}, trial?}) -> Promise of
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
