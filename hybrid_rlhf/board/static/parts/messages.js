/** A conversation. Everything is text: markup of a completion is shown, not executed. */
import { html, useState } from "../core/dom.js";
import { messageText } from "../core/format.js";

export function Message({ role, text, children }) {
  return html`<article class=${`message message-${role}`}>
    <h3 class="message-role">${role}</h3>
    <div class="message-text" dir="auto">${text || html`<span class="muted">(empty)</span>`}</div>
    ${children}
  </article>`;
}

function Picture({ src, name }) {
  const [missing, setMissing] = useState(false);
  if (missing) return html`<code title="The file is missing or has changed">${name}</code>`;
  return html`<img class="thumbnail" src=${src} alt=${name} title=${name} onError=${() => setMissing(true)} />`;
}

/** The images of a prompt; `of` is the address of a sample or a pair that names them. */
export function Pictures({ images, of }) {
  if (!images?.length) return null;
  return html`<div class="pictures">${images.map(({ name, digest }, place) => html`<${Picture} key=${`${place} ${of} ${digest}`} src=${`${of}/images/${digest}`} name=${name} />`)}</div>`;
}

export function Conversation({ messages, images, of, children }) {
  return html`<div class="conversation"><${Pictures} images=${images} of=${of} />
    ${messages.map((message, place) => html`<${Message} key=${place} role=${message.role} text=${messageText(message)} />`)}
    ${children}
  </div>`;
}
