// Formulas between \( and \), which pymdownx.arithmatex writes
window.MathJax = {
  tex: { inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]], processEscapes: true },
  options: { ignoreHtmlClass: ".*|", processHtmlClass: "arithmatex" },
};

// An exact version with its hash: what a server sends in its place is not run. mkdocs writes no `integrity` itself
document.head.append(
  Object.assign(document.createElement("script"), {
    src: "https://unpkg.com/mathjax@3.2.2/es5/tex-mml-chtml.js",
    integrity: "sha384-Wuix6BuhrWbjDBs24bXrjf4ZQ5aFeFWBuKkFekO2t8xFU0iNaLQfp2K6/1Nxveei",
    crossOrigin: "anonymous",
    async: true,
  })
);
