// Filters by the columns of the metadata: a control for each, by what its values are.

/** Controls for columns; `where()` is what they say, as an object for the service. */
export class Filters {
  constructor(box, columns, onChange) {
    this.box = box;
    this.fields = columns.map((column) => field(column)).filter((each) => each);
    box.replaceChildren(...this.fields.map((each) => each.element));
    for (const each of this.fields) each.element.addEventListener("change", onChange);
  }

  /** Column -> operator -> value, of the controls that are set. */
  where() {
    const set = this.fields.map((each) => [each.name, each.conditions()]).filter(([, conditions]) => Object.keys(conditions).length);
    return Object.fromEntries(set);
  }

  clear() { for (const input of this.box.querySelectorAll("input, select")) input.value = ""; }
}

function field(column) {
  const group = document.createElement("div"), name = document.createElement("span");
  group.className = "filter"; group.role = "group";
  name.textContent = column.name;
  group.setAttribute("aria-label", column.name);
  group.append(name);
  if (column.kind === "number" || column.kind === "date") {
    const [least, greatest] = ["from", "to"].map((word, number) => {
      const input = document.createElement("input");
      input.type = column.kind; input.step = "any";
      input.placeholder = String([column.least, column.greatest][number]);
      if (column.kind === "date") { input.min = column.least; input.max = column.greatest; }
      input.setAttribute("aria-label", `${column.name} ${word}`);
      return input;
    });
    group.append(least, " – ", greatest);
    const value = (input) => (column.kind === "number" ? Number(input.value) : input.value);
    return { name: column.name, element: group, conditions: () => ({
      ...(least.value !== "" && { ">=": value(least) }),
      // A day has not ended at midnight.
      ...(greatest.value !== "" && (column.kind === "date" ? { "<=": `${greatest.value}T23:59:59.999999` } : { "<=": value(greatest) })),
    }) };
  }
  let input;
  if (column.values) {
    input = document.createElement("select");
    input.append(new Option("any", ""), ...column.values.filter((text) => text !== "").map((text) => new Option(text, text)));
  } else {
    input = document.createElement("input");
    input.type = "search"; input.placeholder = "the whole value";
  }
  input.setAttribute("aria-label", column.name);
  group.append(input);
  return { name: column.name, element: group, conditions: () => (input.value === "" ? {} : { "=": input.value }) };
}
