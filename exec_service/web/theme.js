// Before the first paint, so that the page does not flash: the theme that was chosen here; the system's if none was.
"use strict";
(() => {
  const chosen = localStorage.getItem("theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
