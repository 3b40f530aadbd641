// Pictures of all layers at once: where in the prompt each of them keeps tokens, and bars of one number a layer.

/** The colours of the style sheet by name, as one number a pixel. */
function palette() {
  const style = getComputedStyle(document.documentElement);
  const context = build("canvas", { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
  const known = new Map();
  return (name) => {
    if (!known.has(name)) {
      context.fillStyle = style.getPropertyValue(`--${name}`).trim();
      context.fillRect(0, 0, 1, 1);
      known.set(name, new Uint32Array(context.getImageData(0, 0, 1, 1).data.buffer)[0]);
    }
    return known.get(name);
  };
}

/** Draw a map: a line a layer, a column of one of `space` pixels a stretch of the prompt. Each layer's function names a stretch's colour. */
function drawMap(canvas, space, layerColours, n, colourOf) {
  const layers = layerColours.length;
  const width = Math.min(n, space);
  const line = layers > 40 ? 3 : layers > 12 ? 4 : 8;
  Object.assign(canvas, { width, height: layers * line });
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, canvas.height);
  const pixels = new Uint32Array(image.data.buffer);
  for (let layer = 0; layer < layers; layer++) {
    const begin = layer * line * width;
    for (let x = 0; x < width; x++) {
      const from = Math.floor((x * n) / width);
      pixels[begin + x] = colourOf(layerColours[layer](from, Math.max(from + 1, Math.floor(((x + 1) * n) / width))));
    }
    for (let copy = 1; copy < line; copy++) pixels.copyWithin(begin + copy * width, begin, begin + width);
  }
  context.putImageData(image, 0, 0);
}

/** Bars of one or more numbers from 0 to 1 for each layer; a click on a layer goes to `onLayer`. */
function drawBars(host, series, label, chosen, onLayer) {
  const layers = series[0].values.length;
  const [width, height] = [300, 64];
  const step = width / layers;
  const svg = shape("svg", { viewBox: `-22 -5 ${width + 24} ${height + 20}`, role: "img", "aria-label": label });
  if (chosen >= 0) svg.append(shape("rect", { class: "here", x: chosen * step, y: -4, width: step, height: height + 8 }));
  for (const share of [0, 0.5, 1]) {
    const y = height * (1 - share);
    svg.append(shape("line", { class: "grid", x1: 0, x2: width, y1: y, y2: y }));
    const text = shape("text", { x: -5, y: y + 3, "text-anchor": "end" });
    text.textContent = String(share);
    svg.append(text);
  }
  series.forEach(({ values, name }, i) => {
    const wide = (step * 0.8) / series.length;
    values.forEach((value, layer) => {
      if (value === null) return;
      const size = height * Math.min(1, Math.max(0, value));
      const x = layer * step + step * 0.1 + i * wide;
      svg.append(shape("rect", { class: `bar ${name}`, x, y: height - size, width: wide, height: size }));
    });
  });
  for (const layer of range(0, layers)) {
    const area = shape("rect", { class: "area", x: layer * step, y: 0, width: step, height });
    const title = shape("title", {});
    title.textContent = `layer ${layer}: ${series.map((one) => `${one.says} ${decimals(one.values[layer])}`).join(", ")}`;
    area.append(title);
    area.addEventListener("click", () => onLayer(layer));
    svg.append(area);
  }
  for (const [layer, x, anchor] of [[0, 0, "start"], [layers - 1, width, "end"]]) {
    const text = shape("text", { x, y: height + 13, "text-anchor": anchor });
    text.textContent = `layer ${layer}`;
    svg.append(text);
  }
  host.replaceChildren(svg);
}
