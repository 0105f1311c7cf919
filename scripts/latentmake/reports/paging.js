// A page of items at a time, so that ten thousand cost no more than one page of them.
// `wanted` returns all items to show, `made` the element of one; `told` is given their number.
// Returns what shows the first page.
function showPages(list, size, wanted, made, told) {
  let page = 0;

  function show(number) {
    const found = wanted();
    const last = Math.max(0, Math.ceil(found.length / size) - 1);
    page = Math.min(Math.max(0, number), last);
    list.replaceChildren(...found.slice(page * size, (page + 1) * size).map(made));
    at("place").textContent = `${page + 1} of ${last + 1}`;
    at("back").disabled = page === 0;
    at("on").disabled = page === last;
    told(found.length);
  }

  at("back").addEventListener("click", () => show(page - 1));
  at("on").addEventListener("click", () => show(page + 1));
  document.addEventListener("keydown", (event) => {
    if (event.target.tagName === "INPUT" || event.target.tagName === "SELECT") return;
    if (event.key === "ArrowLeft") show(page - 1);
    if (event.key === "ArrowRight") show(page + 1);
  });
  return () => show(0);
}
