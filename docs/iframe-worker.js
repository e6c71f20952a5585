// Search in pages that are opened from disk, where a browser starts no worker. Its script runs in a hidden frame instead.
// The theme's search knows a worker of this name, and its offline plugin takes this file in the place of one from a CDN.
(function () {
  if (location.protocol !== "file:") return;
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.frame = frame;
      this.scope = frame.contentWindow;
      this.scope.document.write("<!doctype html><body></body>");
      this.scope.document.close();
      this.scope.postMessage = (data) =>
        setTimeout(() => this.dispatchEvent(new MessageEvent("message", { data })));
      this.scope.importScripts = (...addresses) =>
        addresses.reduce((before, next) => before.then(() => this.load(next)), Promise.resolve());
      this.loaded = this.load(address);
    }

    load(address) {
      return new Promise((resolve, reject) => {
        const script = this.scope.document.createElement("script");
        script.src = address;
        script.onload = resolve;
        script.onerror = reject;
        this.scope.document.body.append(script);
      });
    }

    postMessage(data) {
      this.loaded.then(() => this.scope.dispatchEvent(new this.scope.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
})();
