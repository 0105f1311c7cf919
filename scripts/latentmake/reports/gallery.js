(() => {
  const SVG = "http://www.w3.org/2000/svg";

  function figure({ label, source, width, height }, title) {
    const element = make("figure");
    element.append(make("figcaption", "", label));
    const still = /^data:image|\.png$/.test(source);
    const video = make(still ? "img" : "video", width < 256 ? "pixels" : "");
    Object.assign(video, { muted: true, playsInline: true, preload: "auto", src: source });
    video.style.aspectRatio = `${width} / ${height}`;
    video.setAttribute("aria-label", `${label}: ${title}`);
    element.append(video);
    return element;
  }

  for (const { title, note, caption, clips } of data.rows) {
    const [box, head, row] = [make("article", "item"), make("h2", "", title), make("div", "row")];
    if (note) head.append(" ", make("span", "", note));
    row.append(...clips.map((clip) => figure(clip, title)));
    box.append(head, ...(caption ? [make("q", "", caption)] : []), row);
    at("clips").append(box);
  }

  function draw(tag, attributes, text) {
    const element = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
    if (text !== undefined) element.textContent = text;
    return element;
  }

  // Lines over timesteps from 0 to 1000; each has a name and its values.
  function chart({ timesteps, lines }) {
    const [width, height, left, bottom, top, right] = [720, 320, 64, 44, 40, 16];
    const high = Math.max(...lines.flatMap(({ values }) => values)) * 1.05 || 1;
    const x = (t) => left + (t / 1000) * (width - left - right);
    const y = (v) => height - bottom - (v / high) * (height - bottom - top);
    const svg = draw("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Loss by timestep" });
    svg.append(draw("path", { class: "axis", d: `M${left} ${top}V${height - bottom}H${width - right}` }));
    for (const t of [0, 250, 500, 750, 1000]) svg.append(draw("text", { x: x(t), y: height - bottom + 18, "text-anchor": "middle" }, String(t)));
    svg.append(draw("text", { x: x(500), y: height - 6, "text-anchor": "middle" }, "timestep"));
    for (const v of [0, high / 2, high]) svg.append(draw("text", { x: left - 8, y: y(v) + 4, "text-anchor": "end" }, v.toPrecision(3)));
    lines.forEach(({ name, values, kind }, number) => {
      svg.append(draw("polyline", { class: kind, points: values.map((value, index) => `${x(timesteps[index])},${y(value)}`).join(" ") }));
      values.forEach((value, index) => {
        const dot = draw("circle", { class: kind, cx: x(timesteps[index]), cy: y(value), r: 3 });
        dot.append(draw("title", {}, `${name}: ${value.toPrecision(4)} at timestep ${timesteps[index]}`));
        svg.append(dot);
      });
      const place = left + 110 * number;
      svg.append(draw("line", { class: kind, x1: place, x2: place + 24, y1: 14, y2: 14 }), draw("text", { x: place + 32, y: 18 }, name));
    });
    return svg;
  }

  at("summary").textContent = data.summary;
  showTables();
  if (data.chart) at("loss").querySelector(".scroll").before(chart(data.chart));
  playItems(new Player(data.fps));
})();
