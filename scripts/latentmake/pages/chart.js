// A chart of lines, each with a name, points [x, y], a class (`kind`) and perhaps dots.
function chart(title, unit, lines, last) {
  const draw = (tag, attributes, text) => {
    const element = document.createElementNS(at("to-play").namespaceURI, tag);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const [width, height, left, bottom, top, right] = [720, 320, 64, 44, 40, 16];
  const high = Math.max(...lines.flatMap(({ points }) => points.map(([, y]) => y))) * 1.05 || 1;
  const x = (value) => left + (value / last) * (width - left - right);
  const y = (value) => height - bottom - (value / high) * (height - bottom - top);
  const svg = draw("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  svg.append(draw("path", { class: "axis", d: `M${left} ${top}V${height - bottom}H${width - right}` }));
  for (const part of [0, 0.25, 0.5, 0.75, 1]) svg.append(draw("text", { x: x(part * last), y: height - bottom + 18, "text-anchor": "middle" }, String(Math.round(part * last))));
  svg.append(draw("text", { x: x(last / 2), y: height - 6, "text-anchor": "middle" }, unit));
  for (const value of [0, high / 2, high]) svg.append(draw("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, value.toPrecision(3)));
  let place = left;
  for (const { name, points, kind, dots } of lines) {
    svg.append(draw("polyline", { class: kind, points: points.map(([at, value]) => `${x(at)},${y(value)}`).join(" ") }));
    for (const [at, value] of dots ? points : []) {
      const dot = draw("circle", { class: kind, cx: x(at), cy: y(value), r: 3 });
      dot.append(draw("title", {}, `${name}: ${value.toPrecision(4)} at ${unit} ${at}`));
      svg.append(dot);
    }
    const short = name.length > 24 ? `${name.slice(0, 23)}…` : name;
    svg.append(draw("line", { class: kind, x1: place, x2: place + 24, y1: 14, y2: 14 }), draw("text", { x: place + 32, y: 18 }, short));
    place += 50 + 7 * short.length;
  }
  return svg;
}
