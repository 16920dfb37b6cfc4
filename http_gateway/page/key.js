// The key that a gateway may ask for: asked of the user, kept in the tab's session only.

import { byId, setText } from "./dom.js";

const NAME = "pagewire.api-key";
const PRINTABLE = /^[\x21-\x7e]+$/; // what a header can carry

let asking = null; // the question that is open, as a promise of whether a key was given

export function storedKey() {
  return sessionStorage.getItem(NAME);
}

/** Asks for a key; several who ask at once share one dialog. Resolves to whether there is one. */
export function askForKey(why) {
  byId("give-key").hidden = false;
  asking ??= open(why).finally(() => (asking = null));
  return asking;
}

function open(why) {
  const dialog = byId("key-dialog");
  const input = byId("key");
  let isGiven = false;
  setText(byId("key-why"), why);
  setText(byId("key-wrong"), "");
  input.value = "";

  function take(event) {
    event.preventDefault();
    const key = input.value.trim();
    if (!PRINTABLE.test(key)) {
      const why = key ? "A key has no spaces and no special characters." : "Enter a key.";
      setText(byId("key-wrong"), why);
      input.focus();
      return;
    }
    sessionStorage.setItem(NAME, key);
    isGiven = true;
    dialog.close();
  }

  const close = () => dialog.close();
  byId("key-form").addEventListener("submit", take);
  byId("key-cancel").addEventListener("click", close);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => {
        byId("key-form").removeEventListener("submit", take);
        byId("key-cancel").removeEventListener("click", close);
        input.value = "";
        resolve(isGiven);
      },
      { once: true },
    );
  });
}
