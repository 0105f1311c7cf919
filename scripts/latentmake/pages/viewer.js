// A dialog for what a page enlarges: its buttons and the arrow keys move on, Escape closes it.
const viewer = {
  element: at("viewer"),

  /** Shows elements under a title; `move(right, down)` is told where to go on from them. */
  show(title, elements, move) {
    const { element } = viewer;
    viewer.move = move;
    at("viewer-title").textContent = title;
    at("shown").replaceChildren(...elements);
    if (!element.open) element.showModal();
    element.scrollTop = 0;
  },
};

// The place in a list that is nearest to a number.
const within = (value, list) => Math.max(0, Math.min(list.length - 1, value));

at("before").addEventListener("click", () => viewer.move(-1, 0));
at("after").addEventListener("click", () => viewer.move(1, 0));
at("close").addEventListener("click", () => viewer.element.close());
viewer.element.addEventListener("click", (event) => {
  if (event.target === viewer.element) viewer.element.close(); // beside the dialog
});
const KEYS = {
  ...{ ArrowLeft: [-1, 0], ArrowRight: [1, 0], Home: [-Infinity, 0], End: [Infinity, 0] },
  ...{ ArrowUp: [0, -1], ArrowDown: [0, 1] },
};
document.addEventListener("keydown", (event) => {
  const [right, down] = KEYS[event.key] ?? [];
  if (!viewer.element.open || right === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
  if (viewer.move(right, down) !== false) event.preventDefault();
});

// A path that can be copied. Pages on a disk may not use the clipboard in every browser; the text is selected, too.
function copyable(path) {
  const [element, text, button] = [make("span", "path"), make("code", "", path), make("button", "", "Copy")];
  button.type = "button";
  button.setAttribute("aria-label", `Copy ${path}`);
  button.addEventListener("click", async () => {
    getSelection().selectAllChildren(text);
    const done = await navigator.clipboard?.writeText(path).then(() => true, () => false);
    button.textContent = done || document.execCommand("copy") ? "Copied" : "Press Ctrl+C";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  element.append(text, " ", button);
  return element;
}
