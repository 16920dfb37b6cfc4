// Joins the parts of the page.

import { Chat } from "./chat.js";
import { Cluster } from "./cluster.js";
import { byId } from "./dom.js";
import { askForKey } from "./key.js";

const cluster = new Cluster();
const chat = new Chat();
cluster.start();

byId("give-key").addEventListener("click", async () => {
  if (await askForKey("The gateway needs to know who calls.")) cluster.again();
});

// Where there is room for one view only, two buttons choose it.
const views = [...document.querySelectorAll("nav.views button")];
function show(view) {
  document.body.dataset.view = view;
  for (const each of views) each.setAttribute("aria-pressed", String(each.dataset.view === view));
  cluster.draw();
}
for (const each of views) each.addEventListener("click", () => show(each.dataset.view));
byId("skip").addEventListener("click", () => show("chat"));

addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !byId("key-dialog").open) chat.stop();
});
