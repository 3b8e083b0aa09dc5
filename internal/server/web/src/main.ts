import { isAuthenticated, login, readState, ServiceError, type Target } from "./api";
import { element, fill, showMessage } from "./dom";
import { showList } from "./list";
import { Viewer, type Status } from "./viewer";

const main = element("main");
const title = element("title");
const label = element("label");
const status = element("status");

/** Takes the token out of the address, so that it is neither copied nor kept. */
function takeToken(): string {
  const token = new URLSearchParams(location.hash.slice(1)).get("token") ?? "";
  if (location.hash !== "") history.replaceState(null, "", location.pathname + location.search);
  return token;
}

function setStatus(state: string, text: string): void {
  document.body.dataset["status"] = state;
  if (status.textContent !== text) status.textContent = text;
}

function targetOf(query: URLSearchParams): Target | undefined {
  const session = query.get("session");
  const identity = query.get("identity");
  if (session) return { session };
  if (identity) return { identity };
  return undefined;
}

function askForToken(text: string, hint: string): void {
  setStatus("not-allowed", "Not allowed");
  const form = document.createElement("form");
  form.className = "message";
  form.innerHTML = `
    <p role="alert"></p>
    <p class="hint"></p>
    <label>Access token <input type="password" autocomplete="off" required /></label>
    <button>Log in</button>`;
  fill(form.querySelector("p")!, text);
  fill(form.querySelector(".hint")!, hint);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    void start(form.querySelector("input")!.value.trim());
  });
  main.replaceChildren(form);
}

async function start(token: string): Promise<void> {
  try {
    if (token !== "") await login(token);
    else if (!(await isAuthenticated())) {
      askForToken("This page needs a login.", "Run `abfleet view` on the host and open the URL that it prints.");
      return;
    }
  } catch (error) {
    failed(error);
    return;
  }
  const target = targetOf(new URLSearchParams(location.search));
  if (target === undefined) await openList();
  else await openViewer(target);
}

/** Shows an error of the service, and how to go on. */
function failed(error: unknown): void {
  if (error instanceof ServiceError && error.needsLogin) {
    askForToken(sentence(error.message), sentence(error.hint));
    return;
  }
  setStatus("error", "Not connected");
  const known = error instanceof ServiceError;
  showMessage(
    main,
    known ? sentence(error.message) : "The service does not answer.",
    known ? sentence(error.hint) : "Check on the host that it runs: `systemctl --user status abfleetd`.",
    { text: "Try again", action: () => void start("") },
  );
}

function sentence(text: string): string {
  if (text === "") return "";
  return text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

async function openList(): Promise<void> {
  title.textContent = "Browsers";
  document.title = "Browsers · Agent Browser Fleet";
  label.hidden = true;
  try {
    await showList(main);
    setStatus("list", "");
  } catch (error) {
    failed(error);
  }
}

async function openViewer(target: Target): Promise<void> {
  const isSession = "session" in target;
  let name = isSession ? target.session : target.identity;
  label.textContent = isSession ? "Shared Control" : "Login setup";
  label.title = isSession
    ? "You and the agent operate the same browser. Whose action comes first is not decided."
    : "Log in here, then save the login.";
  const howToStart = isSession
    ? "The agent's next call starts it, and so does `abfleet session use`."
    : "`abfleet identity login` starts it.";
  label.hidden = false;
  setName(name);

  const screen = document.createElement("div");
  screen.id = "screen";
  screen.setAttribute("role", "application");
  screen.setAttribute("aria-label", "Screen of the browser");
  screen.setAttribute("aria-describedby", "leave");
  const leave = document.createElement("p");
  leave.id = "leave";
  leave.textContent = "Keys go to the browser. Control+Shift+F6 leaves the screen.";
  const cover = document.createElement("div");
  cover.id = "cover";
  main.replaceChildren(screen, cover, leave);

  const viewer = new Viewer(screen, {
    target,
    exact: new URLSearchParams(location.search).get("scale") === "1",
    onStatus: (news) => show(news, cover, howToStart, () => viewer.connect()),
  });
  // The screen takes every key, Tab included; this is the way out of it.
  screen.addEventListener(
    "keydown",
    (event) => {
      if (event.key !== "F6" || !event.ctrlKey || !event.shiftKey) return;
      event.preventDefault();
      event.stopImmediatePropagation();
      viewer.release();
      element("home").focus();
    },
    { capture: true },
  );
  viewer.connect();

  // The name is a courtesy: without it the viewer works as well.
  const state = await readState().catch(() => undefined);
  if ("session" in target) {
    const found = state?.sessions.find((entry) => entry.session === target.session);
    if (found?.identity) name = `${found.identity} · ${target.session}`;
  } else {
    name = state?.logins.find((entry) => entry.identity === target.identity)?.name ?? name;
  }
  setName(name);
}

function setName(name: string): void {
  title.textContent = name;
  document.title = `${name} · ${label.textContent}`;
}

function show(news: Status, cover: HTMLElement, howToStart: string, retry: () => void): void {
  const again = { text: "Try now", action: retry };
  switch (news.state) {
    case "connecting":
      setStatus("connecting", "Connecting");
      showMessage(cover, "Connecting to the browser.", "");
      break;
    case "live":
      setStatus("live", "Live");
      cover.replaceChildren();
      break;
    case "reconnecting":
      // The countdown stays out of the status, or a screen reader would read
      // every second of it.
      setStatus("reconnecting", `Reconnecting: ${news.reason}`);
      showMessage(cover, sentence(news.reason), `Reconnecting in ${news.seconds} s.`, again);
      break;
    case "stopped":
      setStatus("stopped", sentence(news.reason));
      showMessage(cover, sentence(news.reason), `${howToStart} Looking again in ${news.seconds} s.`, again);
      break;
    case "waiting":
      setStatus("waiting", `Disconnected: ${news.reason}`);
      showMessage(cover, sentence(news.reason), "", again);
      break;
    case "no-display":
      setStatus("no-display", `Nothing to show: ${news.reason}`);
      showMessage(cover, sentence(news.reason), "The agent can use them all the same. The operator sets `display` in the configuration.");
      break;
    case "not-allowed":
      askForToken("This login is not valid, or it has ended.", "Run `abfleet view` on the host and open the URL that it prints.");
      break;
  }
}

void start(takeToken());
