import RFB from "@novnc/novnc";

/** Encodings and pseudo-encodings that lose information, or ask for it. */
function isLossy(encoding: number): boolean {
  const h264 = 50;
  const jpeg = 21;
  // Quality levels 0 to 9. Advertising any of them is what allows a server to
  // use JPEG inside the Tight encoding, at level 9 too.
  const isQuality = encoding >= -32 && encoding <= -23;
  return encoding === h264 || encoding === jpeg || isQuality;
}

/**
 * A noVNC client that shows exactly the pixels of the display.
 *
 * noVNC has no setting for that, so this filters the list of encodings where
 * noVNC makes it. It leans on a method that noVNC does not document, which is
 * why the version is pinned; e2e compares pixels.
 */
export class LosslessRFB extends RFB {
  protected override _sendEncodings(): void {
    const messages = RFB.messages as { clientEncodings: typeof RFB.messages.clientEncodings };
    const original = messages.clientEncodings;
    messages.clientEncodings = (socket, encodings) =>
      original(
        socket,
        encodings.filter((encoding) => !isLossy(encoding)),
      );
    try {
      super._sendEncodings();
    } finally {
      messages.clientEncodings = original;
    }
  }
}
