/** The texts of a form's fields and the values that they mean; no DOM. */

const oneLine = (item) => typeof item === "string" && !/^[[{-]|: |\n|^\s|\s$/.test(item);

/** A value as the text of a field; lists have an item per line where the server reads them so. */
export function asText(value) {
  if (value === null || value === undefined) return "";
  if (Array.isArray(value)) {
    if (value.every((item) => oneLine(item) || (item !== null && typeof item === "object" && !Array.isArray(item)))) {
      return value.map((item) => (typeof item === "string" ? item : JSON.stringify(item))).join("\n");
    }
    return JSON.stringify(value);
  }
  if (typeof value === "object") return Object.keys(value).length ? JSON.stringify(value) : "";
  return String(value);
}

/** The content of a field for a value: a switch is on or off, all else is text. */
export function asContent(value) {
  return typeof value === "boolean" ? value : asText(value);
}

/** What a field's content means to the server; undefined: it is at its default. Lists and mappings are read there. */
function meant(field, content) {
  if (content === undefined) return undefined;
  if (field.type === "section") return content === field.default ? undefined : content || null;
  if (field.type === "bool") return content === field.default ? undefined : content;
  if (content === asText(field.default)) return undefined;
  if (String(content).trim() === "") return field.type === "list" ? [] : null;
  if ((field.type === "int" || field.type === "float") && Number.isFinite(Number(content))) {
    return Number(content) === field.default ? undefined : Number(content);
  }
  return content;
}

/** Whether a section is used: its switch says so, or it has none. */
export function isOn(field, contents) {
  return contents.get(field.key) ?? field.default;
}

/** The values that differ from the defaults, by key, in the order of the fields; contents: Map of key to content. */
export function changedValues(fields, contents) {
  const off = fields.filter((field) => field.type === "section" && field.default && !isOn(field, contents)).map((field) => `${field.key}.`);
  return fields.flatMap((field) => {
    const value = off.some((prefix) => field.key.startsWith(prefix)) ? undefined : meant(field, contents.get(field.key));
    return value === undefined || value === field.default ? [] : [[field.key, value]];
  });
}
