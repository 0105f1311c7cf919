(() => {
  const SVG = at("to-play").namespaceURI;
  const NAMES = { real: "real", base: "base", adapter: "with the adapter" };

  // -- clips ----------------------------------------------------------------------------------

  const player = new Player(data.fps);

  function figure(kind, clip, title) {
    const element = make("figure");
    const caption = make("figcaption", "", NAMES[kind]);
    element.append(caption);
    if (!clip.source) {
      element.append(make("p", "missing", clip.missing));
      return element;
    }
    const video = make("video");
    video.muted = true;
    video.playsInline = true;
    video.preload = "auto";
    video.src = clip.source;
    video.width = clip.width;
    video.height = clip.height;
    video.className = clip.width < 256 ? "pixels" : "";
    video.setAttribute("aria-label", `${NAMES[kind]}: ${title}`);
    video.style.aspectRatio = `${clip.width} / ${clip.height}`;
    video.style.height = "auto";
    element.append(video);
    return element;
  }

  for (const item of data.items) {
    const box = make("article", "item");
    const row = make("div", "row");
    for (const kind of ["real", "base", "adapter"]) row.append(figure(kind, item.clips[kind], item.name));
    box.append(make("h2", "", item.name), make("q", "", item.caption), row);
    at("clips").append(box);
  }

  playItems(player);

  // -- loss -----------------------------------------------------------------------------------

  function draw(tag, attributes, text) {
    const element = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
    if (text !== undefined) element.textContent = text;
    return element;
  }

  function chart({ timesteps, base, adapter }) {
    const [width, height, left, bottom, top, right] = [720, 320, 64, 44, 40, 16];
    const values = [...base, ...adapter];
    const high = Math.max(...values) * 1.05 || 1;
    const x = (t) => left + (t / 1000) * (width - left - right);
    const y = (v) => height - bottom - (v / high) * (height - bottom - top);
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": "Loss of base and adapter by timestep" });
    svg.append(draw("path", { class: "axis", d: `M${left} ${top}V${height - bottom}H${width - right}` }));
    for (const t of [0, 250, 500, 750, 1000]) {
      svg.append(draw("text", { x: x(t), y: height - bottom + 18, "text-anchor": "middle" }, String(t)));
    }
    svg.append(draw("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, "timestep"));
    for (const share of [0, 0.5, 1]) {
      svg.append(draw("text", { x: left - 8, y: y(share * high) + 4, "text-anchor": "end" }, (share * high).toPrecision(3)));
    }
    for (const [name, points] of [["base", base], ["adapter", adapter]]) {
      const line = points.map((value, index) => `${x(timesteps[index])},${y(value)}`).join(" ");
      svg.append(draw("polyline", { class: name, points: line }));
      points.forEach((value, index) => {
        const dot = draw("circle", { class: name, cx: x(timesteps[index]), cy: y(value), r: 3 });
        dot.append(draw("title", {}, `${NAMES[name]}: ${value.toPrecision(4)} at timestep ${timesteps[index]}`));
        svg.append(dot);
      });
    }
    const legend = draw("g", {});
    ["base", "adapter"].forEach((name, index) => {
      const place = left + 110 * index;
      legend.append(draw("line", { class: name, x1: place, x2: place + 24, y1: 14, y2: 14 }));
      legend.append(draw("text", { x: place + 32, y: 18 }, NAMES[name]));
    });
    svg.append(legend);
    return svg;
  }

  function table(element, heads, lines) {
    const head = make("thead");
    const top = make("tr");
    for (const text of heads) {
      const cell = make("th", "", text);
      cell.scope = "col";
      top.append(cell);
    }
    head.append(top);
    const body = make("tbody");
    for (const [name, ...values] of lines) {
      const line = make("tr");
      const cell = make("th", "", name);
      cell.scope = "row";
      line.append(cell, ...values.map((value) => make("td", "", value)));
      body.append(line);
    }
    element.replaceChildren(head, body);
  }

  const number = (value) => (value === null || value === undefined ? "–" : value.toPrecision(4));
  at("summary").textContent = data.summary;
  if (data.loss) {
    const { timesteps, base, adapter, mean } = data.loss;
    at("chart").append(chart(data.loss));
    const change = (a, b) => (a ? `${b > a ? "+" : ""}${((100 * (b - a)) / a).toFixed(2)} %` : "–");
    table(at("losses"), ["timestep", NAMES.base, NAMES.adapter, "change"], [
      ["mean of all", number(mean.base), number(mean.adapter), change(mean.base, mean.adapter)],
      ...timesteps.map((t, index) => [String(t), number(base[index]), number(adapter[index]), change(base[index], adapter[index])]),
    ]);
    at("loss").hidden = false;
  }
  if (data.statistics.length) {
    table(at("statistics"), ["figure", NAMES.real, NAMES.base, NAMES.adapter],
      data.statistics.map(({ name, real, base, adapter }) => [name, number(real), number(base), number(adapter)]));
    for (const { name, words } of data.statistics) at("words").append(make("dt", "", name), make("dd", "", words));
    at("figures").hidden = false;
  }
  if (data.settings.length) {
    table(at("used"), ["setting", "value"], data.settings);
    at("settings").hidden = false;
  }
})();
