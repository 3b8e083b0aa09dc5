import { readState } from "./api";
import { showMessage } from "./dom";

interface Row {
  href: string;
  name: string;
  detail: string;
  running: boolean;
}

/** Shows this user's Session Browsers and login browsers, with links to them. */
export async function showList(parent: HTMLElement): Promise<void> {
  const { sessions, logins } = await readState();
  const rows: [string, Row[]][] = [
    [
      "Session Browsers",
      sessions.map((entry) => ({
        href: link("session", entry.session),
        name: entry.session,
        detail: entry.identity,
        running: entry.running,
      })),
    ],
    [
      "Login setup",
      logins.map((entry) => ({
        href: link("identity", entry.identity),
        name: entry.name,
        detail: "",
        running: entry.running,
      })),
    ],
  ];
  if (sessions.length + logins.length === 0) {
    showMessage(
      parent,
      "No browser is in use.",
      "An agent opens one with agent_browser_use_identity; `abfleet identity login NAME` opens one to log in with.",
      { text: "Look again", action: () => void showList(parent) },
    );
    return;
  }
  parent.replaceChildren(
    ...rows.filter(([, entries]) => entries.length > 0).map(([heading, entries]) => section(heading, entries)),
  );
}

function link(key: string, value: string): string {
  return `?${new URLSearchParams({ [key]: value })}`;
}

function section(heading: string, rows: Row[]): HTMLElement {
  const box = document.createElement("section");
  const title = document.createElement("h2");
  title.textContent = heading;
  const list = document.createElement("ul");
  for (const row of rows) {
    const item = document.createElement("li");
    const anchor = document.createElement("a");
    anchor.href = row.href;
    anchor.textContent = row.name;
    const detail = document.createElement("span");
    detail.className = "detail";
    detail.textContent = [row.detail, row.running ? "running" : "stopped"].filter(Boolean).join(" · ");
    item.append(anchor, detail);
    list.append(item);
  }
  box.append(title, list);
  return box;
}
