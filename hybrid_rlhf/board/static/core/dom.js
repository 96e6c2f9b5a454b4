/** Preact with hooks and htm, imported from one place: components are functions, markup is html`...`. */
export {
  html,
  render,
  useCallback,
  useEffect,
  useLayoutEffect,
  useMemo,
  useRef,
  useState,
} from "../vendor/htm-preact-standalone.module.js";
