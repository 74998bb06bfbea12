// The search of the site where it is opened from its files: there a browser starts no worker, so the script of the
// worker runs in a hidden frame. Nothing is fetched from another place.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.loaded = new Promise((resolve) => {
        const script = frame.contentDocument.createElement("script");
        this.inside.postMessage = (data) => this.tell(data);
        script.src = url;
        script.onload = resolve;
        script.onerror = () => this.dispatchEvent(new Event("error"));
        frame.contentDocument.body.append(script);
      });
    }
    tell(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      this.onmessage?.(event);
    }
    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })));
    }
    terminate() {
      this.inside.frameElement.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
