(() => {
  function figure({ label, source, width, height }, title) {
    const element = make("figure");
    element.append(make("figcaption", "", label));
    const still = /^data:image|\.png$/.test(source);
    const video = make(still ? "img" : "video", width < 256 ? "pixels" : "");
    Object.assign(video, { muted: true, playsInline: true, preload: "auto", src: source });
    video.style.aspectRatio = `${width} / ${height}`;
    video.setAttribute(still ? "alt" : "aria-label", `${label}: ${title}`);
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

  at("summary").textContent = data.summary;
  showTables();
  if (data.chart) {
    const { timesteps, lines } = data.chart;
    const drawn = lines.map((line) => ({ ...line, points: timesteps.map((timestep, index) => [timestep, line.values[index]]), dots: true }));
    at("loss").querySelector(".scroll").prepend(chart("Loss by timestep", "timestep", drawn, 1000));
  }
  playItems(new Player(data.fps));
})();
