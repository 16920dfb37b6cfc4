// Server-sent events of an answer, out of the bytes of its body.

import { ApiError } from "./api.js";

/** Yields the data of each event, without comments. Throws an ApiError where the body breaks off. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : new ApiError("The answer broke off.");
      });
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // of an answer that nobody reads to its end
  }
}
