/** The element of index.html with that id. */
export function element(id: string): HTMLElement {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`no element ${id}`);
  return found;
}

/** Sets the text of an element; what stands between backticks becomes code. */
export function fill(parent: Element, text: string): void {
  parent.replaceChildren(
    ...text.split("`").map((part, index) => {
      if (index % 2 === 0) return part;
      const code = document.createElement("code");
      code.textContent = part;
      return code;
    }),
  );
}

export interface Button {
  text: string;
  action: () => void;
}

/** Shows a message with a hint, and a button where something can be done. */
export function showMessage(parent: HTMLElement, text: string, hint: string, button?: Button): void {
  const [oldBox] = parent.children;
  const oldButton = oldBox?.querySelector("button");
  // Repeated with another countdown: keep the button, which may have the focus.
  if (oldBox?.className === "message" && oldBox.firstElementChild?.textContent === text && (oldButton !== null) === (button !== undefined)) {
    fill(oldBox.querySelector(".hint")!, hint);
    return;
  }
  const box = document.createElement("div");
  box.className = "message";
  const first = document.createElement("p");
  fill(first, text);
  const second = document.createElement("p");
  second.className = "hint";
  fill(second, hint);
  box.append(first, second);
  if (button !== undefined) {
    const press = document.createElement("button");
    press.type = "button";
    press.textContent = button.text;
    press.addEventListener("click", button.action);
    box.append(press);
  }
  parent.replaceChildren(box);
}
