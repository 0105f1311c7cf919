"use strict";
// All texts of a page are put there by textContent, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);

function make(tag, name, text) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
}

// An edited text, whose parts are removed (-), added (+) or kept.
const marked = ([mark, text]) => make({ "-": "del", "+": "ins" }[mark] ?? "span", "", text);
function edit(parts) {
  const element = make("span", "edit");
  element.append(...parts.map(marked));
  return element;
}

// A table. Heads with a > belong to columns of numbers; a cell that is a number is a bar of
// that share, a list is an edited text.
function table(heads, rows) {
  const names = heads.map((head) => head.replace(">", ""));
  const line = (values, inHead) => {
    const row = make("tr");
    values.forEach((value, index) => {
      const cell = make(inHead || !index ? "th" : "td", heads[index].startsWith(">") ? "number" : "");
      if (cell.tagName === "TH") cell.scope = inHead ? "col" : "row";
      cell.dataset.head = names[index]; // beside it on a phone
      if (typeof value === "number") cell.append(make("div", "bar"));
      else if (Array.isArray(value)) cell.append(edit(value));
      else cell.append(value);
      if (typeof value === "number") cell.firstChild.style.width = `${100 * value}%`;
      row.append(cell);
    });
    return row;
  };
  const [element, head, body] = [make("table"), make("thead"), make("tbody")];
  head.append(line(names, true));
  body.append(...rows.map((row) => line(row, false)));
  element.append(head, body);
  return element;
}

// The tables of a page, each in a card of its own.
function showTables() {
  for (const { id, title, words, heads, rows } of data.tables) {
    const [section, box] = [make("section", "card"), make("div", "scroll")];
    section.id = id;
    if (rows.length) box.append(table(heads, rows));
    section.append(make("h2", "", title), make("p", "quiet", words), box);
    at("tables").append(section);
  }
}
