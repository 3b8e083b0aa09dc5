const base = "/api/agent-browser-fleet";

/** How long an answer may take, in milliseconds. */
const answerTimeout = 10_000;

export interface SessionBrowser {
  session: string;
  identity: string;
  running: boolean;
}

export interface LoginBrowser {
  identity: string;
  name: string;
  running: boolean;
}

export interface State {
  sessions: SessionBrowser[];
  logins: LoginBrowser[];
}

/** An answer of the service that is not ok. */
export class ServiceError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
    readonly hint: string,
  ) {
    super(message);
  }

  /** Whether a login is what is missing. */
  get needsLogin(): boolean {
    return this.status === 401;
  }
}

async function call(path: string, init: RequestInit = {}): Promise<Record<string, unknown>> {
  const response = await fetch(base + path, {
    ...init,
    credentials: "same-origin",
    cache: "no-store",
    redirect: "error",
    signal: AbortSignal.timeout(answerTimeout),
  });
  const answer: unknown = await response.json().catch(() => null);
  if (answer === null || typeof answer !== "object") {
    throw new ServiceError(response.status, "internal", `the service answered ${response.status}`, "");
  }
  const { ok, error } = answer as { ok?: boolean; error?: { code?: string; message?: string; hint?: string } };
  if (ok !== true) {
    throw new ServiceError(
      response.status,
      error?.code ?? "internal",
      error?.message ?? `the service answered ${response.status}`,
      error?.hint ?? "",
    );
  }
  return answer as Record<string, unknown>;
}

export async function isAuthenticated(): Promise<boolean> {
  return (await call("/auth/status"))["authenticated"] === true;
}

export async function login(token: string): Promise<void> {
  await call("/auth/login", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ token }),
  });
}

export async function readState(): Promise<State> {
  const { state } = (await call("/state")) as { state?: Partial<State> };
  return { sessions: state?.sessions ?? [], logins: state?.logins ?? [] };
}

/** What a viewer shows: the browser of a session, or the login browser of an Identity. */
export type Target = { session: string } | { identity: string };

export function socketURL(target: Target): string {
  const url = new URL(`${base}/novnc/ws`, location.href);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  url.search = new URLSearchParams(target as Record<string, string>).toString();
  return url.href;
}
