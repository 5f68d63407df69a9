// What `scripts/check-pages` asks of a page. Everything is looked up as it is shown, so the page is opened once for each width and scheme.
(() => {
  const CONTRAST = 4.5, FOCUS_CONTRAST = 3;
  const parse = (colour) => {
    const numbers = (colour.match(/[\d.]+/g) || []).map(Number);
    return colour.startsWith("rgb") ? [...numbers.slice(0, 3), numbers[3] ?? 1] : [0, 0, 0, 0];
  };
  const over = (top, below) => [0, 1, 2].map((at) => top[at] * top[3] + below[at] * (1 - top[3])).concat(1);
  const luminance = (colour) => colour.slice(0, 3).map((part) => part / 255)
    .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
  const contrast = (one, other) => {
    const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
  };
  const isShape = (one) => one instanceof SVGElement && !one.matches("svg, text, tspan, g");
  const opacity = (one) => {
    let product = 1;
    for (; one; one = one.parentElement) product *= Number(getComputedStyle(one).opacity);
    return product;
  };
  const paint = (one) => {
    const style = getComputedStyle(one);
    const colour = parse(isShape(one) ? style.fill : one instanceof SVGElement ? "" : style.backgroundColor);
    const own = isShape(one) ? Number(style.fillOpacity) : 1;
    return [...colour.slice(0, 3), colour[3] * own * opacity(one)];
  };
  const canvas = () => matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18, 1] : [255, 255, 255, 1];
  // A shape is behind a point where its area is; lines are thin.
  const covers = (one, x, y) => !isShape(one) || !one.isPointInFill || one.isPointInFill(new DOMPoint(x, y).matrixTransform(one.getScreenCTM().inverse()));
  // The colour behind a point of an element; none where it is not to be seen there.
  const behind = (one, x, y) => {
    const all = document.elementsFromPoint(x, y);
    const at = all.findIndex((other) => one === other || one.contains(other));
    if (at < 0) return null;
    const layers = [];
    for (const other of all.slice(at).filter((other) => covers(other, x, y))) {
      layers.push(paint(other));
      if (layers.at(-1)[3] >= 1) break;
    }
    return layers.reduceRight((below, layer) => over(layer, below), canvas());
  };
  const name = (one) => {
    const own = one.id ? "#" + one.id : one.getAttribute("class") ? "." + one.getAttribute("class").trim().replace(/\s+/g, ".") : "";
    return one.tagName.toLowerCase() + own;
  };
  const quoted = (text) => JSON.stringify(text.trim().slice(0, 40));
  const clip = (one) => one.closest(".scroll, pre");
  const isScroller = (one) => one.scrollWidth > one.clientWidth && /auto|scroll/.test(getComputedStyle(one).overflowX);

  // The texts that are shown, with their places.
  const texts = () => {
    const found = [], walker = document.createTreeWalker(document.documentElement, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const node = walker.currentNode, one = node.parentElement;
      if (!node.data.trim() || one.closest("script, style, title, desc, head") || !one.checkVisibility()) continue;
      const range = document.createRange();
      range.selectNodeContents(node);
      const rects = [...range.getClientRects()].filter((rect) => rect.width > 0 && rect.height > 0);
      if (rects.length) found.push({ one, text: node.data, rects });
    }
    return found;
  };

  const faults = () => {
    const found = [], all = texts();
    if (!all.length) found.push("it shows no text");
    const root = document.documentElement;
    if (root.scrollWidth > innerWidth) found.push(`it is ${root.scrollWidth} pixels wide on a screen of ${innerWidth}`);
    for (const one of document.querySelectorAll("body *")) {
      if (!clip(one) && !one.closest("svg") && one.getBoundingClientRect().right > innerWidth + 1) found.push(`${name(one)} reaches beyond the screen`);
    }
    for (const { one, text, rects } of all) {
      const style = getComputedStyle(one), svg = one.closest("svg");
      const [rect] = rects, own = parse(svg ? style.fill : style.color);
      const below = behind(one, rect.left + rect.width / 2, rect.top + rect.height / 2);
      if (below) {
        const ratio = contrast(over([...own.slice(0, 3), own[3] * opacity(one)], below), below);
        if (ratio < CONTRAST) found.push(`the contrast of ${name(one)} ${quoted(text)} is ${ratio.toFixed(2)}`);
      }
      let box = svg || one;
      while (!svg && getComputedStyle(box).display === "inline") box = box.parentElement;
      // A space at the end of a line may hang over.
      const place = box.getBoundingClientRect(), hangs = style.whiteSpace.startsWith("pre") ? 6 : 1;
      const isOut = rects.some((rect) => rect.left < place.left - 1 || rect.right > place.right + hangs || svg && rect.bottom > place.bottom + 2);
      if (isOut && box.tagName !== "PRE") found.push(`${name(one)} ${quoted(text)} leaves the box of ${name(box)}`);
    }
    found.push(...overlaps(all));
    const shown = document.documentElement.innerText || document.documentElement.textContent;
    const told = shown + [...document.querySelectorAll("[data-points]")].map((one) => one.dataset.points).join(" ");
    const hints = [...document.querySelectorAll("body [title]:not(iframe), body svg title")];
    for (const hint of hints.map((one) => one.title || one.textContent)) {
      if (hint.split(/[\s:,]+/).some((word) => !told.includes(word))) found.push(`only the pointer shows ${quoted(hint)}`);
    }
    return [...new Set(found)];
  };

  // Texts that lie on one another. Lines are as high as their letters, which are lower than the place of a line.
  const overlaps = (all) => {
    const places = all.flatMap(({ one, text, rects }) => rects.map((rect) => {
      const within = clip(one)?.getBoundingClientRect(), edge = 0.22 * rect.height;
      return { one, text, top: rect.top + edge, bottom: rect.bottom - edge, left: rect.left + 1,
               right: Math.min(rect.right, within?.right ?? Infinity) - 1 };
    })).filter((place) => place.right > place.left).sort((a, b) => a.top - b.top);
    const found = [];
    places.forEach((place, at) => {
      for (let next = at + 1; next < places.length && places[next].top < place.bottom; next++) {
        const other = places[next];
        if (other.left < place.right && place.left < other.right && other.one !== place.one) {
          found.push(`${quoted(place.text)} and ${quoted(other.text)} lie on one another`);
        }
      }
    });
    return found;
  };

  // What must be reached by the keyboard: what the browser makes so, what scrolls, and what listens to a pointer (`mouse`).
  const reacting = (mouse) => {
    const natural = [...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex='0']")];
    const scrollers = [...document.querySelectorAll("body *")].filter((one) => isScroller(one) && !one.querySelector("[tabindex]"));
    return [...new Set([...natural, ...scrollers, ...mouse])].filter((one) => one.checkVisibility());
  };

  // How the focus is shown, or why it is not.
  const focus = (one) => {
    const style = getComputedStyle(one), width = parseFloat(style.outlineWidth);
    if (style.outlineStyle === "none" || width < 2) return `${name(one)} does not show that it has the focus`;
    let around = one;
    while (around && paint(around)[3] < 1) around = around.parentElement;
    const ratio = contrast(parse(style.outlineColor), around ? paint(around) : canvas());
    return ratio < FOCUS_CONTRAST ? `the contrast of the focus of ${name(one)} is ${ratio.toFixed(2)}` : null;
  };

  window.probe = { faults, reacting, focus, name };
})();
