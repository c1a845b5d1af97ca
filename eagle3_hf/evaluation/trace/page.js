"use strict";
// Everything is made of text nodes: no token is read as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("trace");
const LETTERS = { head: "H", lookup: "L", both: "HL", root: "", target: "" };
const NAMES = { head: "head", lookup: "lookup", both: "head and lookup", target: "the target's choice" };

function element(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function button(label, words, act) {
  const made = element("button", "", label);
  made.type = "button";
  made.setAttribute("aria-label", words);
  made.title = words;
  made.addEventListener("click", act);
  return made;
}

const code = (c) => "U+" + c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");

// A token alone: what would be invisible, or would turn the line around, is shown as a sign.
function visible(text) {
  return text
    .replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length))
    .replace(/[\p{C}\p{Zl}\p{Zp}]|(?! )\p{Zs}/gu, (c) => ({ "\n": "↵", "\t": "⇥", "\r": "␍" })[c] || code(c));
}

// The text itself keeps its line breaks. Joiners are part of words and emoji.
function readable(text) {
  const parts = [];
  for (const part of text.split(/(\n|[^\P{Cc}\t\n]|[\u202a-\u202e\u2066-\u2069])/u)) {
    if (part === "\n") parts.push(element("span", "sign", "↵"), "\n");
    else if (/^([^\P{Cc}\t\n]|[\u202a-\u202e\u2066-\u2069])$/u.test(part)) parts.push(element("span", "sign", code(part)));
    else if (part) parts.push(part);
  }
  return parts;
}

const percent = (value) =>
  value === null ? "–" : value > 0 && value < 0.001 ? "<0.1%" : (100 * value).toFixed(value < 0.0995 ? 1 : 0) + "%";
const wordOf = (id) => visible(data.words[id]);

function chip(id, source) {
  const made = element("bdi", "chip from-" + source, wordOf(id));
  made.dir = "auto";
  made.title = `${wordOf(id)} (id ${id})`;
  return made;
}

// ----- what follows from the data ------------------------------------------------------------------------------------

for (const round of data.rounds) {
  round.path = round.nodes.flatMap((node, index) => (node[6] ? [index] : []));
  round.sources = round.path.slice(1).map((index) => round.nodes[index][2]);
  if (round.emitted.length > round.accepted) round.sources.push("target");
  round.depths = [];
  round.children = round.nodes.map(() => []);
  round.nodes.forEach(([, parent], index) => {
    round.depths.push(parent < 0 ? 0 : round.depths[parent] + 1);
    if (parent >= 0) round.children[parent].push(index);
  });
  round.children.forEach((own) => own.sort((a, b) => round.nodes[b][3] - round.nodes[a][3] || a - b));
}
const last = data.rounds.length - 1;

// ----- the parts of the page -----------------------------------------------------------------------------------------

const most = Math.max(1, ...data.rounds.map((round) => round.emitted.length));
const strip = element("div", "strip");
strip.style.setProperty("--part", 4 / most + "rem");
strip.style.setProperty("--gap", most > 12 ? "0px" : "1px"); // thin parts would be all gap
const bars = data.rounds.map((round, index) => {
  const bar = button("", `Round ${index + 1}: ${round.accepted} drafts accepted`, () => show(index));
  bar.append(...round.sources.map((source) => element("i", "from-" + source)));
  return bar;
});
strip.append(...bars);

const first = button("|◀", "First round (Home)", () => show(0));
const before = button("◀", "Previous round (left arrow)", () => show(now - 1));
const after = button("▶", "Next round (right arrow)", () => show(now + 1));
const end = button("▶|", "Last round (End)", () => show(last));
const where = element("output");
where.setAttribute("aria-live", "polite");
const steps = element("nav", "steps", first, before, where, after, end);
steps.append(element("kbd", "", "keys: ← → Home End"));

const legend = element("p", "legend");
for (const source of ["head", "lookup", "both", "target"]) {
  const entry = element("span", "", NAMES[source]);
  entry.style.setProperty("--mark", `var(--${source})`);
  legend.append(entry);
}

const text = element("p", "text");
text.dir = "auto";
const prompt = element("span", "prompt");
if (data.left_out) prompt.append(element("span", "sign", `… ${data.left_out} earlier tokens … `));
for (const [id, piece] of data.prompt) {
  const token = element("span", "", ...readable(piece));
  token.dataset.id = id;
  prompt.append(token);
}
text.append(prompt);
const tokens = data.text.map(([id, piece]) => {
  const token = element("span", "token", ...readable(piece));
  token.dataset.id = id;
  token.title = `id ${id}`;
  text.append(token);
  return token;
});
if (tokens.length) tokens[0].classList.add("from-target"); // of the prefill
data.rounds.forEach((round) =>
  round.sources.forEach((source, index) => tokens[round.start + index]?.classList.add("from-" + source)),
);

const verdict = element("p", "verdict");
const facts = element("p", "facts");
const times = element("div", "times");
const tree = element("div", "tree");
const side = element("div", "side", element("h2", "", "Text so far"), text, verdict, times, facts);
const other = element("div", "", element("h2", "", "Tree"), tree);
main.append(strip, steps, legend, element("div", "columns", side, other));

// ----- a round -------------------------------------------------------------------------------------------------------

let now = 0;

function show(index) {
  if (!data.rounds.length) {
    where.textContent = "no rounds";
    verdict.textContent = "The text has no round: it ended with its first token, or the target verifies no drafts.";
    [first, before, after, end].forEach((each) => (each.disabled = true));
    return;
  }
  now = Math.min(Math.max(index, 0), last);
  const round = data.rounds[now];
  where.textContent = `Round ${now + 1} of ${last + 1}`;
  first.disabled = before.disabled = now === 0;
  after.disabled = end.disabled = now === last;
  bars.forEach((bar, at) => (at === now ? bar.setAttribute("aria-current", "step") : bar.removeAttribute("aria-current")));
  scrollWithin(strip, bars[now], "Left", "Width");
  const stop = round.start + round.emitted.length;
  tokens.forEach((token, at) => {
    token.classList.toggle("later", at >= stop);
    token.classList.toggle("now", at >= round.start && at < stop);
  });
  if (tokens[stop - 1]) scrollWithin(text, tokens[stop - 1], "Top", "Height");
  tell(round);
  draw(round);
  try {
    history.replaceState(null, "", "#" + (now + 1));
  } catch {
    // The page is shown inside another one.
  }
}

function scrollWithin(box, child, side, size) {
  const begin = child["offset" + side] - box["offset" + side];
  box["scroll" + side] = begin - box["client" + size] / 2;
}

function tell(round) {
  const [drafted, missed] = [round.nodes.length - 1, round.cause !== null];
  const token = round.emitted[round.emitted.length - 1];
  verdict.replaceChildren();
  verdict.className = "verdict" + (missed ? " missed" : "");
  const right = { 0: "No draft was", 1: "1 draft was" }[round.accepted] || `${round.accepted} drafts were`;
  verdict.append(drafted ? `${right} right. ` : "Nothing was drafted in this round. ");
  if (round.emitted.length > round.accepted) {
    verdict.append(round.accepted ? "Behind them the target chose " : "The target chose ", chip(token, "target"));
    verdict.append(` (probability ${percent(round.choice)})`, reason(round));
  } else {
    verdict.append("The text ended at an accepted draft.");
  }
  const sum = round.ms.reduce((one, two) => one + two, 0);
  times.replaceChildren(
    ...["draft", "verify", "other"].map((name, index) => {
      const part = element("i", name);
      part.style.width = (100 * round.ms[index]) / (sum || 1) + "%";
      return part;
    }),
  );
  const parts = ["draft", "verify", "other"].map((name, index) => `${name} ${round.ms[index].toFixed(1)}`);
  facts.textContent =
    `${sum.toFixed(1)} ms: ${parts.join(", ")}. ${drafted} of ${round.candidates} candidates drafted, ` +
    `${round.levels} levels of the head.`;
}

function reason(round) {
  const at = round.path[round.path.length - 1];
  const guesses = round.children[at].length;
  switch (round.cause) {
    case "outside_vocabulary":
      return ", which is outside the draft vocabulary: the head cannot propose it.";
    case "not_a_candidate":
      return ", which the head could have proposed, but it was not among the candidates here" +
        (guesses ? "." : ": this node has none.");
    case "pruned":
      return `, which was a candidate here (chance ${percent(round.pruned)}), but better ones took its place in the tree.`;
    case "wrong_ancestor":
      return ", which the tree has at this level, but behind another token (dashed).";
    default:
      return round.nodes.length > 1 ? ". Nothing was guessed at its place." : ".";
  }
}

function draw(round) {
  const onPath = new Set(round.path);
  const tail = round.path[round.path.length - 1];
  const choice = round.emitted[round.emitted.length - 1];
  const hasChoice = round.emitted.length > round.accepted;
  const names = element("div", "row names");
  for (const name of ["token", "chance", "head", "target"]) names.append(element("span", "", name));
  const rows = [names];
  const visit = (index) => {
    const [token, parent, source, chance, head, target, accepted] = round.nodes[index];
    const kind = accepted ? "accepted" : onPath.has(parent) ? "tried" : "unreached";
    const made = row(kind, round.depths[index], token, source, { accepted: "✓", tried: "✗", unreached: "" }[kind]);
    made.dataset.id = token;
    if (index) made.append(...[chance, head, target].map((value) => element("span", "", percent(value))));
    if (hasChoice && !accepted && token === choice && round.depths[index] === round.accepted + 1)
      made.classList.add("elsewhere");
    rows.push(made);
    round.children[index].forEach(visit);
    if (index === tail && hasChoice) {
      const own = row("choice", round.depths[index] + 1, choice, "target", "→");
      own.append(element("span"), element("span"), element("span", "", percent(round.choice)));
      rows.push(own);
    }
  };
  visit(0);
  tree.style.setProperty("--deepest", Math.max(1, ...round.depths) + 1);
  tree.replaceChildren(...rows);
}

function row(kind, depth, token, source, mark) {
  const guides = element("b");
  guides.style.setProperty("--depth", depth);
  const node = element("div", "node", guides, element("span", "mark", mark), chip(token, source));
  if (LETTERS[source]) {
    const letter = element("span", "letter", LETTERS[source]);
    letter.title = NAMES[source];
    node.append(letter);
  }
  return element("div", "row " + kind, node);
}

document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  const to = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  show(to);
});
show((parseInt(location.hash.slice(1), 10) || 1) - 1);
