// Sorts the table by a column, shows the rows that hold what is typed, opens details. Nothing else runs here.
const table = document.getElementById("layers");
const rows = [...table.tBodies[0].rows];
const found = document.getElementById("found");
for (const head of table.tHead.rows[0].cells) {
  const button = head.querySelector("button");
  if (!button) continue;
  button.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = (row) => row.cells[head.cellIndex].dataset.v ?? row.cells[head.cellIndex].textContent;
    const order = (a, b) => {
      const [x, y] = [key(a), key(b)];
      const both = x !== "" && y !== "" && !isNaN(x) && !isNaN(y);
      return (both ? x - y : x.localeCompare(y, undefined, { numeric: true })) * (down ? -1 : 1);
    };
    table.tBodies[0].append(...[...rows].sort(order));
  });
}
table.addEventListener("click", (event) => {
  if (!event.target.classList.contains("why")) return;
  const list = event.target.nextElementSibling;
  // below the tallest cell of the row, whose height it is while the list is hidden
  const cell = event.target.parentElement;
  if (list.hidden) list.style.marginTop = `${cell.offsetHeight - event.target.offsetHeight}px`;
  list.hidden = !list.hidden;
  event.target.setAttribute("aria-expanded", String(!list.hidden));
});
let texts;
document.getElementById("find").addEventListener("input", (event) => {
  const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
  texts ??= rows.map((row) => row.textContent.toLowerCase());
  let count = 0;
  rows.forEach((row, i) => {
    row.hidden = !words.every((word) => texts[i].includes(word));
    count += !row.hidden;
  });
  found.textContent = `${count} of ${rows.length} layers`;
});
