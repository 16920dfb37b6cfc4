// The chat: questions go to /v1/chat/completions, answers come as a stream.

import { ApiError, call } from "./api.js";
import { byId, element, setText } from "./dom.js";
import { events } from "./events.js";
import { count, counted, percent, rate, seconds } from "./format.js";

const FLOATS = ["temperature", "top_p", "min_p", "repetition_penalty"];
const INTEGERS = ["top_k", "max_tokens", "seed"];
const NEAR_END = 40; // pixels: whoever reads the end wants to follow it

export class Chat {
  #messages = []; // of the conversation so far, as the API has them
  #running = null; // the AbortController of the answer that comes
  #composer = byId("composer");
  #question = byId("question");
  #transcript = byId("transcript");
  #noTurns = byId("no-turns");
  #send = byId("send");

  constructor() {
    this.#composer.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#running) this.stop();
      else this.#ask();
    });
    this.#question.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.#running) this.#ask();
    });
    this.#question.addEventListener("input", () => this.#fit());
    byId("new-chat").addEventListener("click", () => this.#begin());
    byId("settings").addEventListener("input", () => this.#showChanged());
    this.#showChanged(); // a browser may keep what was in them
  }

  /** Ends the answer that comes, if one does. */
  stop() {
    this.#running?.abort();
  }

  #begin() {
    this.stop();
    this.#messages = [];
    this.#transcript.replaceChildren(this.#noTurns);
    this.#question.focus();
  }

  async #ask() {
    const text = this.#question.value.trim();
    if (!text) return;
    this.#question.value = "";
    this.#fit();
    const question = { role: "user", content: text };
    const sent = [...this.#messages, question];
    const settings = this.#settings();
    const system = settings.system ? [{ role: "system", content: settings.system }] : [];

    this.#noTurns.remove();
    this.#transcript.append(turn("You", "question", text).node);
    const answer = new Answer(this.#transcript);
    this.#running = new AbortController();
    this.#showRunning(true);
    announce("Answering");
    const messages = this.#messages; // of this chat: another one may begin meanwhile
    try {
      const body = {
        messages: [...system, ...sent],
        stream: true,
        stream_options: { include_usage: true },
        ...settings.options,
      };
      await answer.read(body, this.#running.signal);
    } catch (error) {
      if (error.name === "AbortError") answer.stopped();
      else answer.failed(error instanceof ApiError ? error.message : `The page failed: ${error}`);
    } finally {
      this.#running = null;
      this.#showRunning(false);
    }
    if (messages !== this.#messages) return;
    if (answer.text) {
      this.#messages = [...sent, answer.message];
      announce(answer.text);
    } else if (!this.#question.value) {
      this.#question.value = text; // nothing came of it: to be mended, or sent again
      this.#fit();
    }
  }

  #settings() {
    const form = new FormData(this.#composer);
    const options = {};
    for (const name of [...FLOATS, ...INTEGERS]) {
      const value = form.get(name);
      if (value !== "") options[name] = Number(value);
    }
    return { system: form.get("system").trim(), options };
  }

  #showChanged() {
    const { system, options } = this.#settings();
    const changed = Object.entries(options).map(([name, value]) => `${name} ${value}`);
    if (system) changed.unshift("system prompt");
    setText(byId("changed"), changed.length ? `· ${changed.join(" · ")}` : "");
  }

  #showRunning(isRunning) {
    setText(this.#send, isRunning ? "Stop" : "Send"); // one button, so that the focus stays
    this.#send.classList.toggle("stops", isRunning);
  }

  #fit() {
    this.#question.style.height = "auto";
    this.#question.style.height = `${this.#question.scrollHeight + 2}px`;
  }
}

/** One answer in the transcript, from the call to its account. */
class Answer {
  text = "";
  #reasoning = "";
  #transcript;
  #turn = turn("Model", "answer", "");
  #thoughts = null; // the element of the reasoning's text
  #startedAt = performance.now();
  #firstAt = 0;
  #finish = "";
  #usage = null;

  constructor(transcript) {
    this.#transcript = transcript;
    this.#turn.node.setAttribute("aria-busy", "true");
    this.#keepEnd(() => transcript.append(this.#turn.node));
  }

  /** What the next call tells the model of this one. */
  get message() {
    const message = { role: "assistant", content: this.text };
    if (this.#reasoning) message.reasoning_content = this.#reasoning;
    return message;
  }

  async read(body, signal) {
    const response = await call("v1/chat/completions", { body, signal });
    for await (const data of events(response.body)) {
      if (data === "[DONE]") {
        this.#end();
        return;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message);
      this.#usage = chunk.usage ?? this.#usage;
      for (const choice of chunk.choices) this.#take(choice);
    }
    signal.throwIfAborted();
    throw new ApiError("The answer broke off.");
  }

  stopped() {
    this.#end("stopped");
  }

  failed(message) {
    this.#end();
    const line = element("p", "wrong", message);
    line.setAttribute("role", "alert");
    this.#keepEnd(() => this.#turn.node.append(line));
  }

  #take({ delta, finish_reason: finish }) {
    if (delta.content || delta.reasoning_content) this.#firstAt ||= performance.now();
    this.#keepEnd(() => {
      if (delta.reasoning_content) this.#think(delta.reasoning_content);
      if (delta.content) {
        if (this.#thoughts && !this.text) this.#thoughts.parentElement.open = false;
        this.text += delta.content;
        this.#turn.text.append(delta.content);
      }
    });
    this.#finish = finish ?? this.#finish;
  }

  #think(text) {
    if (!this.#thoughts) {
      this.#thoughts = element("div", "text");
      const name = element("summary", "", "Reasoning");
      const shown = element("details", "reasoning", name, this.#thoughts);
      shown.open = true;
      this.#turn.text.before(shown);
    }
    this.#reasoning += text;
    this.#thoughts.append(text);
  }

  #end(how = this.#finish === "length" ? "ended at the most tokens that are allowed" : "") {
    this.#turn.node.removeAttribute("aria-busy");
    this.#turn.text.normalize();
    this.#thoughts?.normalize();
    const said = this.#account();
    if (how) said.push(how);
    if (!said.length) return;
    const account = element("p", "account soft", said.join(" · "));
    if (this.#usage) account.prepend(share(this.#usage));
    this.#keepEnd(() => this.#turn.node.append(account));
  }

  #account() {
    if (!this.#usage) return [];
    const { prompt_tokens: prompt, completion_tokens: drawn } = this.#usage;
    const cached = cachedTokens(this.#usage);
    const said = [
      `${count(cached)} of ${counted(prompt, "prompt token")} cached (${percent(cached / prompt)})`,
      `${count(drawn)} generated`,
    ];
    if (!this.#firstAt) return said;
    said.push(`first after ${seconds(this.#firstAt - this.#startedAt)}`);
    const restMs = performance.now() - this.#firstAt;
    if (drawn > 1 && restMs > 0) said.push(`${rate((1000 * (drawn - 1)) / restMs)} tokens/s`);
    return said;
  }

  /** Makes a change; who reads the end of the transcript sees its new end. */
  #keepEnd(change) {
    const at = this.#transcript;
    const isAtEnd = at.scrollHeight - at.scrollTop - at.clientHeight < NEAR_END;
    change();
    if (isAtEnd) at.scrollTop = at.scrollHeight;
  }
}

function turn(who, kind, text) {
  const shown = element("div", "text", text);
  return { node: element("article", `turn ${kind}`, element("h3", "", who), shown), text: shown };
}

function cachedTokens(usage) {
  return usage.prompt_tokens_details?.cached_tokens ?? 0;
}

/** A bar: of the prompt's tokens, those that a cache held. */
function share(usage) {
  const part = element("span", "part");
  part.style.width = percent(cachedTokens(usage) / usage.prompt_tokens);
  const bar = element("span", "share", part);
  bar.setAttribute("aria-hidden", "true");
  return bar;
}

function announce(text) {
  setText(byId("announcer"), text);
}
