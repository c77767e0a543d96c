// The race: one prompt, plainly and adaptively, one after the other; then both side by side as they came.

import { getJson, streamed } from "./api.js";
import { withKey } from "./keys.js";
import { Lane } from "./lane.js";

const find = (id) => document.getElementById(id);
const lanes = { plain: new Lane("plain"), adaptive: new Lane("adaptive") };

function say(text, kind = "") {
  find("proof").textContent = text;
  find("proof").className = kind;
}

async function open() {
  const models = (await getJson("/v1/models")).data;
  find("model").replaceChildren(...models.map(({ id }) => new Option(id, id)));
  say("");
}

async function run(lane, decoding, seed) {
  const body = {
    model: find("model").value,
    messages: [{ role: "user", content: find("prompt").value }],
    max_tokens: Number(find("tokens").value),
    temperature: Number(find("temperature").value),
    seed,
    decoding: { ...decoding, trace: true },
  };
  const began = performance.now();
  for await (const event of streamed("/v1/chat/completions", body)) lane.take(event, performance.now() - began);
  lane.end();
}

/** The proof: token ids, one by one. */
function compare() {
  const plain = lanes.plain.ids;
  const adaptive = lanes.adaptive.ids;
  const same = plain.length === adaptive.length && plain.every((id, index) => id === adaptive[index]);
  const ratio = lanes.adaptive.took ? lanes.plain.took / lanes.adaptive.took : 1;
  if (same) {
    say(`identical: ${plain.length} tokens, token for token; adaptive is ${ratio.toFixed(2)}× as fast`, "good");
  } else {
    const shorter = plain.length < adaptive.length ? plain : adaptive;
    const at = shorter.findIndex((_, index) => plain[index] !== adaptive[index]);
    const why = lanes.adaptive.report?.lossless === false ? "the policy accepts lossy answers" : "this should not be";
    say(`different from token ${(at < 0 ? shorter.length : at) + 1} on: ${why}`, "bad");
  }
  const { plain: left, adaptive: right } = lanes;
  const total = Math.max(...[left, right].map((lane) => lane.steps.slice(1).reduce((sum, step) => sum + step.ms, 0)), 1);
  const most = Math.max(...[left, right].flatMap((lane) => lane.steps.map((step) => step.tokens.length)), 1);
  for (const lane of [left, right]) lane.drawSteps(total, most);
  find("reason").textContent = `Why so: ${right.report?.reason ?? "not told"}`;
}

async function race(event) {
  event.preventDefault();
  find("start").disabled = true;
  find("replay").hidden = true;
  find("reason").textContent = "";
  for (const lane of Object.values(lanes)) lane.forget();
  try {
    const seed = Math.floor(Math.random() * 2 ** 31);
    say("plain decoding runs");
    await run(lanes.plain, { method: "vanilla" }, seed);
    say("adaptive decoding runs");
    await run(lanes.adaptive, {}, seed);
    compare();
    find("replay").hidden = false;
  } catch (error) {
    failed(error);
  } finally {
    find("start").disabled = false;
  }
}

/** Both as they came, from each one's first token on. */
async function replay() {
  find("replay").disabled = find("start").disabled = true;
  for (const lane of Object.values(lanes)) lane.clear();
  const left = Object.values(lanes).map((lane) => ({ lane, next: 0 }));
  const began = performance.now();
  while (left.some(({ lane, next }) => next < lane.events.length)) {
    const now = await new Promise(requestAnimationFrame);
    for (const each of left) {
      const { events } = each.lane;
      while (each.next < events.length && events[each.next].at - events[0].at <= now - began) {
        each.lane.show(events[each.next++]);
        if (each.next === events.length) each.lane.end();
      }
    }
  }
  find("replay").disabled = find("start").disabled = false;
}

find("race").addEventListener("submit", race);
find("replay").addEventListener("click", replay);
const failed = withKey(open, say);
