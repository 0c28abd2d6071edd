// Sets the chosen theme before the first paint, so that the page does not flash. Without a choice the system's applies.
"use strict";
(() => {
  const chosen = localStorage.getItem("theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
