// Sets light or dark before anything is painted. Without a choice of the user the system decides.
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const name = "pagewire.theme";

  function chosen() {
    try {
      return localStorage.getItem(name);
    } catch {
      return null; // where pages may store nothing, the choice lasts as long as the page
    }
  }

  function isDark() {
    return (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  }

  const theme = chosen();
  if (theme === "dark" || theme === "light") root.dataset.theme = theme;

  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const show = () => button.setAttribute("aria-pressed", String(isDark()));
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      try {
        localStorage.setItem(name, root.dataset.theme);
      } catch {
        // see above
      }
      show();
    });
    system.addEventListener("change", show);
    show();
  });
})();
