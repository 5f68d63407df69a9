// Shows the values of the step that is pointed at; without this, captions have the last ones.
for (const chart of document.querySelectorAll(".chart")) {
  const curves = [...chart.querySelectorAll("[data-points]")].map((curve) => JSON.parse(curve.dataset.points));
  if (!curves.length) continue;
  const svg = chart.querySelector("svg[role]"), cursor = svg.querySelector(".cursor"), output = chart.querySelector("output");
  const caption = output.textContent;
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const far = (point) => Math.abs(point[0][0] - x);
    const nearest = curves.filter((points) => points.length).map((points) => points.reduce((a, b) => far(b) < far(a) ? b : a));
    cursor.setAttribute("x1", nearest[0][0][0]);
    cursor.setAttribute("x2", nearest[0][0][0]);
    cursor.style.visibility = "visible";
    output.textContent = nearest.map((point) => point[1]).join("\n");
  });
  svg.addEventListener("pointerleave", () => {
    cursor.style.visibility = "hidden";
    output.textContent = caption;
  });
}
