/** A conversation with one or two saved models, streamed, each with a history of its own. */
import { postForStream, streamed, useData } from "../core/api.js";
import { html, useEffect, useRef, useState } from "../core/dom.js";
import { formatNumber } from "../core/format.js";
import { setQuery } from "../core/route.js";
import { useDraft, useSetting } from "../core/settings.js";
import { Empty, ErrorLine, Field, Loading, ViewHead } from "../parts/basic.js";
import { Message } from "../parts/messages.js";
import { ModelSelect } from "../parts/picker.js";

export const SAMPLING = { temperature: 0.7, top_p: 0.95, max_new_tokens: 256, seed: 0 };
const FIELDS = [["temperature", "Temperature", 0, 5, 0.05], ["top_p", "Top p", 0.01, 1, 0.01], ["max_new_tokens", "Longest answer", 1, 4000, 1], ["seed", "Seed", 0, 2 ** 31 - 1, 1]];

/** The messages of one model: [{role, content, score?, error?, streaming?, loading?}], and what sends the next. */
function useConversation(place) {
  const [kept, keep] = useDraft(`chat.${place}`, []);
  const [messages, setMessages] = useState(kept);
  const abort = useRef(null);
  const last = (change) => setMessages((old) => [...old.slice(0, -1), { ...old.at(-1), ...change(old.at(-1)) }]);
  useEffect(() => () => abort.current?.abort(), []);
  useEffect(() => keep(messages.map((message) => ({ ...message, streaming: false, loading: false }))), [messages]);
  const send = async (model, text, { system, sampling, reward }) => {
    const history = [...messages.filter((message) => !message.error), { role: "user", content: text }];
    setMessages([...history, { role: "assistant", content: "", streaming: true, loading: true }]);
    abort.current = new AbortController();
    const asked = [...(system ? [{ role: "system", content: system }] : []), ...history].map(({ role, content }) => ({ role, content }));
    try {
      const response = await postForStream("/api/chat", { models: [model], messages: asked, sampling, reward: reward || null }, abort.current.signal);
      last(() => ({ loading: false })); // the answer begins when the model is loaded
      for await (const part of streamed(response)) {
        if (part.error) throw new Error(part.error);
        last((message) => (part.done ? { score: part.score } : { content: message.content + part.delta }));
      }
      last(() => ({ streaming: false }));
    } catch (error) {
      const stopped = abort.current.signal.aborted;
      last(() => ({ streaming: false, loading: false, stopped, error: stopped ? null : error.message }));
    }
  };
  const clear = () => {
    abort.current?.abort();
    setMessages([]);
  };
  return { messages, send, clear, stop: () => abort.current?.abort(), busy: Boolean(messages.at(-1)?.streaming) };
}

/** What a message shows before its first token: a first message loads the model, which takes a while. */
function Waiting({ name, loading }) {
  const [seconds, setSeconds] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => setSeconds((value) => value + 1), 1000);
    return () => clearInterval(timer);
  }, []);
  return html`<span class="waiting"><span class="spinner" aria-hidden="true"></span>
    <span>${loading ? `Loading ${name}…` : "Answering…"}${seconds > 2 ? ` ${seconds} s` : ""}</span></span>`;
}

function Column({ name, conversation }) {
  const end = useRef(null);
  useEffect(() => end.current?.scrollIntoView({ block: "nearest" }), [conversation.messages]);
  return html`<section class="card chat-column" aria-label=${`Conversation with ${name}`}><h2>${name}</h2>
    <div class="conversation" role="log">${conversation.messages.map((message, place) => html`<${Message} key=${place} role=${message.role} text=${message.content || (message.streaming ? html`<${Waiting} name=${name} loading=${message.loading} />` : message.stopped && "(stopped)")}>
      ${message.score !== null && message.score !== undefined && html`<p class="message-score"><span class="muted">score</span> <b>${formatNumber(message.score)}</b></p>`}
      <${ErrorLine} text=${message.error} /></${Message}>`)}<div ref=${end}></div></div></section>`;
}

/** Where the system prompt comes from. */
function systemHint(edited, trained) {
  if (edited !== null) return "Empty: none.";
  if (trained.length > 1 && trained[0] !== trained[1]) return "Each model gets the one of its training until you change it here.";
  return trained[0] ? "That of the training." : "Empty: none, as in the training as far as it recorded prompts.";
}

export function Chat({ query }) {
  const { data: known, error, loading } = useData("/api/models");
  const models = known?.filter((model) => model.kind !== "reward");
  const rewards = known?.filter((model) => model.kind !== "chat") ?? [];
  const [sampling, setSampling] = useSetting("sampling", SAMPLING);
  const [system, setSystem] = useState(null);
  const [chosenReward, setReward] = useSetting("reward", "");
  const reward = rewards.some((model) => model.path === chosenReward) ? chosenReward : "";
  const [text, setText] = useState("");
  const sides = [useConversation(0), useConversation(1)];
  const [remembered, remember] = useDraft("chat.models", []);
  const named = query.model.length ? query.model : remembered.filter((path) => models?.some((model) => model.path === path));
  const paths = [named[0] ?? models?.[0]?.path, named[1]].filter(Boolean);
  const busy = sides.some((side) => side.busy);
  const nameOf = (path) => models?.find((model) => model.path === path)?.name ?? path;
  const trained = paths.map((path) => models?.find((model) => model.path === path)?.system ?? "");
  const send = (event) => {
    event?.preventDefault();
    if (!text.trim() || busy) return;
    paths.forEach((path, place) => sides[place].send(path, text.trim(), { system: (system ?? trained[place]).trim(), sampling, reward }));
    setText("");
  };
  const choose = (place) => (path) => {
    sides[place].clear();
    const next = [paths[0], paths[1]];
    next[place] = path;
    remember(next.filter(Boolean));
    setQuery({ model: next.filter(Boolean) });
  };
  const save = () => {
    const content = paths.map((path, place) => ({ model: path, messages: sides[place].messages.map(({ role, content: said }) => ({ role, content: said })) }));
    const file = URL.createObjectURL(new Blob([JSON.stringify(content, null, 2)], { type: "application/json" }));
    Object.assign(document.createElement("a"), { href: file, download: "conversation.json" }).click();
    URL.revokeObjectURL(file);
  };
  const press = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && send(event);
  return html`
    <${ViewHead} title="Chat">${models?.length > 0 && html`
      <${ModelSelect} models=${models} value=${paths[0]} label="Model" onChange=${choose(0)} />
      <${ModelSelect} models=${models} value=${paths[1]} label="Next to" optional onChange=${choose(1)} />
      <button class="button" onClick=${save} disabled=${!sides[0].messages.length}>Save</button>
      <button class="button" onClick=${() => sides.forEach((side) => side.clear())} disabled=${!sides[0].messages.length}>Start over</button>`}</${ViewHead}>
    <${ErrorLine} text=${error} />
    ${loading && html`<${Loading} what="models" />`}
    ${models && !models.length && html`<${Empty} title="No saved model yet">A run saves its model when it ends. Models below the board's folders appear here.</${Empty}>`}
    ${paths.length > 0 && html`
      <details class="card"><summary>Sampling, system prompt, scores</summary>
        <div class="sampling-fields">${FIELDS.map(([key, label, min, max, step]) => html`<${Field} key=${key} label=${label}><input class="input" type="number" min=${min} max=${max} step=${step} value=${sampling[key]}
          onChange=${(event) => event.target.value !== "" && setSampling({ ...sampling, [key]: Number(event.target.value) })} /></${Field}>`)}</div>
        <${Field} label="System prompt" hint=${systemHint(system, trained)}><textarea class="input" rows="2" value=${system ?? trained[0]} onInput=${(event) => setSystem(event.target.value)}></textarea></${Field}>
        <${Field} label="Score answers with" hint=${rewards.length ? null : "A run of a reward model saves one; others are named with --models."}><select class="input" value=${reward} onChange=${(event) => setReward(event.target.value)}>
          <option value="">no reward model</option>${rewards.map((model) => html`<option key=${model.path} value=${model.path} selected=${model.path === reward}>${model.name}</option>`)}</select></${Field}></details>
      <div class=${`chat-columns ${paths.length > 1 ? "two" : ""}`}>${paths.map((path, place) => html`<${Column} key=${path + place} name=${nameOf(path)} conversation=${sides[place]} />`)}</div>
      <form class="composer" onSubmit=${send}><textarea class="input" rows="2" aria-label="Message" placeholder="Message. Enter sends, Shift+Enter is a new line." value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${press}></textarea>
        ${busy ? html`<button type="button" class="button" onClick=${() => sides.forEach((side) => side.stop())}>Stop</button>` : html`<button type="submit" class="button primary" disabled=${!text.trim()}>Send</button>`}</form>`}`;
}
