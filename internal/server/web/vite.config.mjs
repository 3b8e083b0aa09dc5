import { readFileSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { defineConfig } from "vite";

const dist = fileURLToPath(new URL("dist/", import.meta.url));
const noVNC = new URL("node_modules/@novnc/novnc/", import.meta.url);

// The licences of what is bundled ask to be passed on with it.
function licences() {
  const { version } = JSON.parse(readFileSync(new URL("package.json", noVNC), "utf8"));
  return [
    `This page contains noVNC ${version}, unmodified; its source is the npm package @novnc/novnc of that version.\n`,
    readFileSync(new URL("LICENSE.txt", noVNC), "utf8"),
    "noVNC contains pako:\n",
    readFileSync(new URL("vendor/pako/LICENSE", noVNC), "utf8"),
  ].join("\n");
}

export default defineConfig({
  // The page is served under more than one path.
  base: "./",
  build: {
    outDir: dist,
    assetsDir: "assets",
    // noVNC awaits at the top level of a module.
    target: "es2022",
    // Inlined assets would be data: URLs, which the page's policy refuses for
    // scripts and styles.
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
  },
  plugins: [
    {
      name: "licences",
      generateBundle() {
        this.emitFile({ type: "asset", fileName: "licences.txt", source: licences() });
      },
    },
    {
      name: "keep-placeholder",
      // dist/ is emptied by each build, and is in git by this file.
      closeBundle() {
        writeFileSync(`${dist}.gitkeep`, "");
      },
    },
  ],
});
