// Sorts a table when the heading of a column is clicked. Clicks change from largest first to smallest first to the original order;
// columns of text begin with the smallest. Without this script, headings are plain text.
"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const bodies = [...table.tBodies];
  // If a table has several bodies, each body is sorted as a whole: its rows belong together.
  const parent = bodies.length > 1 ? table : bodies[0];
  const original = bodies.length > 1 ? bodies : [...parent.rows];
  const items = original.filter(item => !item.classList.contains("block"));
  const headings = [...table.tHead.rows[0].cells];
  if (items.length < 2) continue;

  const key = (item, column) => {
    const cell = (item.rows ? item.rows[0] : item).cells[column];
    return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent.trim();
  };
  const compare = (a, b) => typeof a == "number" && typeof b == "number" ? b - a
    : String(a).localeCompare(String(b), "en", {numeric: true});

  const sort = (column, direction) => {
    headings.forEach((heading, i) => i == column && direction
      ? heading.setAttribute("aria-sort", direction) : heading.removeAttribute("aria-sort"));
    table.classList.toggle("sorted", Boolean(direction));
    if (!direction) return parent.append(...original);
    const numeric = items.some(item => typeof key(item, column) == "number");
    const first = numeric ? "descending" : "ascending";
    const keyed = items.map(item => [key(item, column), item]);
    const empty = keyed.filter(([value]) => value === "");
    const full = keyed.filter(([value]) => value !== "").sort(([a], [b]) => compare(a, b));
    if (direction != first) full.reverse();
    parent.append(...[...full, ...empty].map(([, item]) => item));
  };

  headings.forEach((heading, column) => {
    if (!heading.textContent.trim()) return;
    const button = document.createElement("button");
    button.type = "button";
    button.title = "sort by this column";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const numeric = items.some(item => typeof key(item, column) == "number");
      const order = numeric ? ["descending", "ascending", null] : ["ascending", "descending", null];
      sort(column, order[(order.indexOf(heading.getAttribute("aria-sort")) + 1) % 3]);
    });
  });
}
// Open everything that is collapsed before the page is printed.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(details => { details.open = true; }));
