// The last decisions as a table, and one of them as a whole.

import { getJson } from "./api.js";
import { withKey } from "./keys.js";

const MOST = 1000;
const find = (id) => document.getElementById(id);
let decisions = [];

function say(text, kind = "") {
  find("proof").textContent = text;
  find("proof").className = kind;
}

const number = (value) => (typeof value === "number" ? value.toFixed(2) : "");

function row(each) {
  const open = document.createElement("button");
  open.type = "button";
  open.textContent = each.request_id;
  open.addEventListener("click", () => show(each.request_id).catch(failed));
  const outcome = each.outcome ?? {};
  const cells = [
    new Date(each.at * 1000).toLocaleTimeString(),
    open,
    each.class,
    each.rule,
    outcome.method ?? each.method,
    number(outcome.accepted_tokens_per_step),
    number(outcome.speedup_estimate),
  ];
  const line = document.createElement("tr");
  for (const cell of cells) line.insertCell().append(cell);
  return line;
}

function draw() {
  const words = find("filter").value.toLowerCase();
  const found = decisions.filter((each) => JSON.stringify(each).toLowerCase().includes(words));
  find("rows").replaceChildren(...found.map(row));
  say(`${found.length} of ${decisions.length}`);
}

async function show(id) {
  const whole = await getJson(`/admin/decisions/${encodeURIComponent(id)}`);
  find("whole-title").textContent = id;
  find("whole-reason").textContent = whole.outcome?.reason ?? whole.plan.reason;
  find("whole-text").textContent = JSON.stringify(whole, null, 2);
  find("whole").showModal();
}

async function open() {
  decisions = (await getJson(`/admin/decisions?limit=${MOST}`)).decisions;
  draw();
}

find("filter").addEventListener("input", draw);
find("refresh").addEventListener("click", () => open().catch(failed));
const failed = withKey(open, say);
