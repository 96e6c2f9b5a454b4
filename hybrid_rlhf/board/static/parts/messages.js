/** A conversation. Everything is text: markup of a completion is shown, not executed. */
import { html } from "../core/dom.js";
import { messageText } from "../core/format.js";

export function Message({ role, text, children }) {
  return html`<article class=${`message message-${role}`}>
    <h3 class="message-role">${role}</h3>
    <div class="message-text" dir="auto">${text || html`<span class="muted">(empty)</span>`}</div>
    ${children}
  </article>`;
}

export function Conversation({ messages, children }) {
  return html`<div class="conversation">
    ${messages.map((message, place) => html`<${Message} key=${place} role=${message.role} text=${messageText(message)} />`)}
    ${children}
  </div>`;
}
