// Nodes and their text. Text only ever becomes text: nothing here, or elsewhere, parses markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** Makes an element with classes and children, which are nodes or texts. */
export function element(tag, classes = "", ...children) {
  const made = document.createElement(tag);
  if (classes) made.className = classes;
  made.append(...children);
  return made;
}

/** Makes an element of a picture. */
export function shape(tag, attributes = {}) {
  const made = document.createElementNS(SVG, tag);
  setAttributes(made, attributes);
  return made;
}

export function setAttributes(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
}

/** Sets a text; what says the same already is left alone, and with it a user's selection. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/**
 * Keeps one node for each item, in the items' order.
 *
 * `make(item)` returns an object with `node`; `update(kept, item)` shows an item's news in it.
 */
export class Keyed {
  #parent;
  #kept = new Map(); // key |-> what make returned

  constructor(parent) {
    this.#parent = parent;
  }

  show(items, { key, make, update }) {
    const gone = new Set(this.#kept.keys());
    let at = this.#parent.firstElementChild;
    for (const item of items) {
      const name = key(item);
      gone.delete(name);
      if (!this.#kept.has(name)) this.#kept.set(name, make(item));
      const kept = this.#kept.get(name);
      if (kept.node === at) at = at.nextElementSibling;
      else this.#parent.insertBefore(kept.node, at);
      update(kept, item);
    }
    for (const name of gone) {
      this.#kept.get(name).node.remove();
      this.#kept.delete(name);
    }
  }
}
