// Elements of the page. All text is set as text, never as HTML.

/** Return the element of the page with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Return a new element with these attributes and children; a string becomes a text node. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [attribute, value] of Object.entries(attributes)) {
    made.setAttribute(attribute, value);
  }
  made.append(...children);
  return made;
}

/** Call `use` with each key that the user gives in the form. */
export function onKey(form, use) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const input = form.querySelector("input");
    const key = input.value.trim();
    input.value = "";
    await use(key);
  });
}

/** Show the form that asks for a key, with the reason why the last key was rejected. */
export function askForKey(form, reason) {
  form.hidden = false;
  form.querySelector(".error").textContent = reason;
}
