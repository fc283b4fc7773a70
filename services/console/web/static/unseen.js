// Text that models wrote: characters that nobody sees become marks. The same set as in visible.py.

const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\u{e0000}-\u{e007f}]+/gu;

const NAMES = ("NUL SOH STX ETX EOT ENQ ACK BEL BS HT LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC " +
  "FS GS RS US").split(" ");

export function markOf(character) {
  const code = character.codePointAt(0);
  if (code < NAMES.length) return NAMES[code];
  return code === 0x7f ? "DEL" : `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

export function appendVisible(element, text) {
  let position = 0;
  for (const match of text.matchAll(UNSEEN)) {
    element.append(text.slice(position, match.index));
    const mark = document.createElement("span");
    mark.className = "ctl";
    mark.textContent = [...match[0]].map(markOf).join(" ");
    element.append(mark);
    position = match.index + match[0].length;
  }
  element.append(text.slice(position));
}

export function visibleText(text) {
  return text.replace(UNSEEN, (found) => `[${[...found].map(markOf).join(" ")}]`).replaceAll("\n", "⏎").replaceAll("\t", "⇥");
}
