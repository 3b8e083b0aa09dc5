// The part of noVNC that this page uses.
declare module "@novnc/novnc" {
  export default class RFB extends EventTarget {
    // What may be sent to the server. Not documented by noVNC; see display.ts.
    static readonly messages: {
      clientEncodings(socket: unknown, encodings: number[]): void;
    };
    constructor(target: Element, channel: WebSocket, options?: { shared?: boolean });
    scaleViewport: boolean;
    showDotCursor: boolean;
    focusOnClick: boolean;
    qualityLevel: number;
    compressionLevel: number;
    background: string;
    focus(options?: FocusOptions): void;
    sendKey(keysym: number, code: string, down?: boolean): void;
    disconnect(): void;
    protected _sendEncodings(): void;
  }
}
