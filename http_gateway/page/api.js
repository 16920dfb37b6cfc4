// Calls of the gateway, whose errors become texts that can be shown.

import { askForKey, storedKey } from "./key.js";

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/**
 * Calls an endpoint; with a body it is a POST. Returns the response once it has begun.
 *
 * Where a key is needed the user is asked for one, unless `isQuiet`, and the call made again.
 * Throws an ApiError, or an AbortError or TimeoutError.
 */
export async function call(path, { body, signal, timeoutMs, isQuiet = false } = {}) {
  while (true) {
    const sent = storedKey();
    const ends = timeoutMs ? AbortSignal.timeout(timeoutMs) : signal;
    const response = await send(path, body, ends, sent);
    if (response.ok) return response;
    const error = await errorOf(response);
    if (error.status !== 401) throw error;
    const isNew = sent !== storedKey(); // given meanwhile, because of another call
    if (!isNew && (isQuiet || !(await askForKey(error.message)))) throw error;
  }
}

async function send(path, body, signal, key) {
  const headers = {};
  if (key) headers.authorization = `Bearer ${key}`;
  const options = { headers, signal, credentials: "omit", cache: "no-store" };
  if (body !== undefined) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    headers["content-type"] = "application/json";
  }
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError" || error.name === "TimeoutError") throw error;
    throw new ApiError("The gateway cannot be reached.");
  }
}

async function errorOf(response) {
  let told;
  try {
    told = (await response.json()).error.message;
  } catch {
    told = response.statusText; // of something in between that is not a gateway
  }
  const wait = response.headers.get("retry-after");
  const again = wait ? ` Try again in ${wait} s.` : "";
  const { status } = response;
  return new ApiError(`${told || "An error without a message"} (status ${status}).${again}`, status);
}
