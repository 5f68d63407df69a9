// Shows the values of the moment that is pointed at, or that the arrow keys reach; without this, captions have the last ones.
for (const moments of document.querySelectorAll(".moments")) {
  const curves = [...moments.querySelectorAll("[data-points]")].map((curve) => JSON.parse(curve.dataset.points)).filter((points) => points.length);
  if (!curves.length) continue;
  const cursor = moments.querySelector(".cursor"), output = moments.closest("figure").querySelector("output");
  output.textContent ||= "The pointer or the arrow keys show what was live at a moment.";
  const caption = output.textContent;
  const stops = [...new Set(curves.flat().map((point) => point[0]))].sort((a, b) => a - b);
  let stop = stops.length;
  const show = (percent) => {
    const far = (point) => Math.abs(point[0] - percent);
    const nearest = curves.map((points) => points.reduce((a, b) => far(b) < far(a) ? b : a));
    cursor.style.left = `${nearest[0][0]}%`;
    cursor.hidden = false;
    output.textContent = nearest.map((point) => point[1]).join("\n");
  };
  const leave = () => {
    cursor.hidden = true;
    output.textContent = caption;
    stop = stops.length;
  };
  const point = (event) => {
    const box = moments.getBoundingClientRect();
    show((event.clientX - box.left) / box.width * 100);
  };
  moments.tabIndex = 0;
  moments.addEventListener("pointerdown", point);
  moments.addEventListener("pointermove", point);
  // A finger leaves as soon as it is lifted.
  moments.addEventListener("pointerleave", (event) => event.pointerType === "touch" || leave());
  moments.addEventListener("blur", leave);
  moments.addEventListener("keydown", (event) => {
    const last = stops.length - 1, far = Math.ceil(last / 10);
    const to = { ArrowLeft: stop - 1, ArrowRight: stop + 1, PageUp: stop - far, PageDown: stop + far, Home: 0, End: last }[event.key];
    if (event.key === "Escape") leave();
    if (to === undefined) return;
    event.preventDefault();
    stop = stop > last && event.key === "ArrowRight" ? 0 : Math.min(Math.max(to, 0), last);
    show(stops[stop]);
    cursor.scrollIntoView({ block: "nearest", inline: "nearest" });
  });
}
// The arrow keys scroll what is wider than its place.
const places = new ResizeObserver((sized) => {
  for (const { target } of sized) {
    if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }
});
for (const place of document.querySelectorAll(".scroll:not(:has([tabindex])), pre")) places.observe(place);
