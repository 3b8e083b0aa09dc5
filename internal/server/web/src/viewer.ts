import RFB from "@novnc/novnc";
import { isAuthenticated, socketURL, type Target } from "./api";
import { LosslessRFB } from "./display";

/** Close codes of the gateway (internal/vnc/relay.go). */
const closeNotAllowed = 4001;
const closeBrowserStopped = 4002;
const closeNotFound = 4008;
const closeNoDisplay = 4010;
const closeServiceRestart = 1012;

/** Waits between tries, in milliseconds. The last one repeats. */
const backOff = [500, 1_000, 2_000, 4_000, 8_000, 15_000];
/** A connection that lived this long starts the waits over, in milliseconds. */
const settled = 5_000;

/** What a viewer reports; `reason` is a plain sentence without a full stop. */
export type Status =
  | { state: "connecting" }
  | { state: "live" }
  | { state: "reconnecting" | "stopped"; reason: string; seconds: number }
  | { state: "waiting" | "no-display"; reason: string }
  | { state: "not-allowed" };

export interface Options {
  target: Target;
  /** Shows each pixel of the display as one, unchanged. */
  exact: boolean;
  onStatus(status: Status): void;
}

/**
 * Viewer keeps one display on screen for as long as the page is open: it
 * connects, and whatever ends the connection, it says why and connects again.
 */
export class Viewer {
  private rfb?: RFB;
  private tries = 0;
  private countdown?: number;
  private liveSince = 0;
  private lastReason = "";

  constructor(
    private readonly screen: HTMLElement,
    private readonly options: Options,
  ) {
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden && this.idle) this.connect();
    });
    window.addEventListener("online", () => {
      if (this.idle) this.connect();
    });
  }

  /** Whether there is no connection, and another try is allowed. */
  private idle = true;

  connect(): void {
    window.clearInterval(this.countdown);
    this.idle = false;
    this.options.onStatus({ state: "connecting" });

    const socket = new WebSocket(socketURL(this.options.target));
    let opened = false;
    socket.addEventListener("open", () => {
      opened = true;
    });
    // noVNC hides why a connection ended; the socket knows.
    socket.addEventListener("close", (event) => {
      this.rfb = undefined;
      void this.ended(event, opened);
    });

    const rfb = new (this.options.exact ? LosslessRFB : RFB)(this.screen, socket, { shared: true });
    rfb.scaleViewport = !this.options.exact;
    rfb.showDotCursor = true;
    rfb.background = "transparent";
    rfb.qualityLevel = 8;
    rfb.compressionLevel = 2;
    rfb.addEventListener("connect", () => {
      this.rfb = rfb;
      this.liveSince = performance.now();
      this.options.onStatus({ state: "live" });
      // Typing should go to the browser, unless the person is elsewhere.
      if (document.activeElement === document.body) rfb.focus({ preventScroll: true });
    });
  }

  /** Lets go of the modifiers that the person held to leave the screen. */
  release(): void {
    for (const [keysym, code] of [
      [0xffe1, "ShiftLeft"],
      [0xffe2, "ShiftRight"],
      [0xffe3, "ControlLeft"],
      [0xffe4, "ControlRight"],
    ] as const) {
      this.rfb?.sendKey(keysym, code, false);
    }
  }

  private async ended(event: CloseEvent, opened: boolean): Promise<void> {
    if (this.liveSince > 0 && performance.now() - this.liveSince > settled) this.tries = 0;
    this.liveSince = 0;

    let reason = event.reason || "the connection was lost";
    let allowed = event.code !== closeNotAllowed;
    if (!opened) {
      // A refused upgrade and an absent service look the same to a page.
      try {
        allowed = await isAuthenticated();
        reason = "the service refused the connection";
      } catch {
        reason = "the service does not answer";
      }
    }
    if (!allowed) {
      this.options.onStatus({ state: "not-allowed" });
      return;
    }
    if (event.code === closeNoDisplay) {
      // Waiting changes nothing, so that nobody is told of a next try.
      this.options.onStatus({ state: "no-display", reason });
      return;
    }
    const stopped = event.code === closeBrowserStopped || event.code === closeNotFound;
    if (event.code === closeServiceRestart) this.tries = 0;
    this.retry(reason, stopped ? "stopped" : "reconnecting");
  }

  private retry(reason: string, state: "reconnecting" | "stopped"): void {
    this.idle = true;
    this.lastReason = reason;
    const wait = backOff[Math.min(this.tries, backOff.length - 1)] ?? 0;
    this.tries++;
    const due = performance.now() + wait;
    const tick = (): void => {
      // A page that nobody sees needs no connection.
      if (document.hidden) {
        window.clearInterval(this.countdown);
        this.options.onStatus({ state: "waiting", reason: this.lastReason });
        return;
      }
      const left = due - performance.now();
      if (left <= 0) {
        this.connect();
        return;
      }
      this.options.onStatus({ state, reason, seconds: Math.ceil(left / 1000) });
    };
    this.countdown = window.setInterval(tick, 500);
    tick();
  }
}
