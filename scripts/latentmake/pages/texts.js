// Captions of items, for the pages that show or edit them.

// Fills an element with a text in three parts: kept by all encoders, by some of them, by none.
function encoded(element, [all, some, none]) {
  element.append(all);
  if (some) element.append(make("span", "some", some));
  if (none) element.append(make("del", "", none));
  return element;
}

// A badge for each encoder: how many tokens a text has, and how many of them the encoder cuts.
const counts = (seen, names) => seen.map(([tokens, kept], index) => {
  const words = tokens > kept ? `${tokens} tokens, ${tokens - kept} cut` : `${tokens} tokens`;
  const badge = make("span", tokens > kept ? "badge over" : "badge", seen.length > 1 ? `${names[index]}: ${words}` : words);
  badge.title = names[index];
  return badge;
});

// An edited text: what stayed before the edit, the words that are gone, those that came, and what stayed after it.
function edited(before, now) {
  const [was, is] = [before.split(/(?<=\s)/), now.split(/(?<=\s)/)];
  let [start, end] = [0, 0];
  while (start < Math.min(was.length, is.length) && was[start] === is[start]) start += 1;
  while (end < Math.min(was.length, is.length) - start && was.at(-1 - end) === is.at(-1 - end)) end += 1;
  const [gone, came] = [was, is].map((words) => words.slice(start, words.length - end).join(""));
  return [was.slice(0, start).join(""), make("del", "", gone), make("ins", "", came), was.slice(was.length - end).join("")];
}

// The datasets of items as choices, which are hidden if there is only one.
function chooseDataset(items) {
  const names = [...new Set([...items].map((item) => item.dataset))];
  at("dataset").append(new Option("All datasets", ""), ...names.map((name) => new Option(name, name)));
  at("dataset").hidden = names.length < 2;
  return names;
}
