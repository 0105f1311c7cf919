// A card for each encoder: how long texts are, and how many are cut.
function showEncoders(encoders) {
  const SVG = "http://www.w3.org/2000/svg";

  function histogram(encoder) {
    const svg = document.createElementNS(SVG, "svg");
    const most = Math.max(1, ...encoder.bars);
    svg.setAttribute("viewBox", `0 0 ${encoder.bars.length} 100`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `How many texts have how many tokens for ${encoder.name}`);
    encoder.bars.forEach((count, index) => {
      const bar = document.createElementNS(SVG, "rect");
      const height = count ? Math.max(2, (count / most) * 100) : 0;
      const first = index * encoder.width;
      const over = encoder.limit !== null && first > encoder.limit;
      bar.setAttribute("x", index + 0.08);
      bar.setAttribute("y", 100 - height);
      bar.setAttribute("width", 0.84);
      bar.setAttribute("height", height);
      if (over) bar.setAttribute("class", "over");
      const title = document.createElementNS(SVG, "title");
      title.textContent = `${first} to ${first + encoder.width - 1} tokens: ${count}`;
      bar.append(title);
      svg.append(bar);
    });
    if (encoder.limit !== null && encoder.limit < encoder.bars.length * encoder.width) {
      const line = document.createElementNS(SVG, "line");
      const place = (encoder.limit + 1) / encoder.width;
      line.setAttribute("x1", place);
      line.setAttribute("x2", place);
      line.setAttribute("y1", 0);
      line.setAttribute("y2", 100);
      svg.append(line);
    }
    return svg;
  }

  for (const encoder of encoders) {
    const card = make("div", "encoder");
    const limit = encoder.limit === null ? "sees every token" : `sees ${encoder.limit} tokens`;
    card.append(make("h2", "", encoder.name));
    card.append(make("p", "", `${limit}; half of the texts have ${encoder.median} or fewer, the longest ${encoder.longest}`));
    const cut = encoder.cut === 0 ? "No text is cut." : `${encoder.cut} of ${encoder.texts} texts are cut.`;
    card.append(make("p", encoder.cut ? "warn" : "", cut), histogram(encoder));
    const axis = make("div", "axis");
    axis.append(make("span", "", "0"), make("span", "", `${encoder.bars.length * encoder.width - 1} tokens`));
    card.append(axis);
    at("encoders").append(card);
  }
}
