package io.sparkdml.ui;

import jakarta.servlet.http.HttpServlet;
import jakarta.servlet.http.HttpServletRequest;
import jakarta.servlet.http.HttpServletResponse;
import java.io.IOException;
import java.io.InputStream;
import java.io.UncheckedIOException;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.zip.CRC32;

/** Serves the script and the style sheet out of the jar, and nothing else. */
final class Assets extends HttpServlet {
  private static final Map<String, String> TYPES =
      Map.of("training.js", "text/javascript; charset=utf-8", "training.css", "text/css; charset=utf-8");

  private final Map<String, byte[]> files = new LinkedHashMap<>();
  private final String version;

  Assets() {
    CRC32 sum = new CRC32();
    TYPES.keySet().stream().sorted().forEach(name -> {
      byte[] bytes = read(name);
      if (bytes != null) {
        files.put(name, bytes);
        sum.update(bytes);
      }
    });
    version = Long.toHexString(sum.getValue());
  }

  private static byte[] read(String name) {
    try (InputStream stream = Assets.class.getResourceAsStream("static/" + name)) {
      return stream == null ? null : stream.readAllBytes();
    } catch (IOException error) {
      throw new UncheckedIOException(error);
    }
  }

  /** In the addresses, so that a browser keeps a file until the jar has another. */
  String version() {
    return version;
  }

  @Override
  protected void doGet(HttpServletRequest request, HttpServletResponse response) throws IOException {
    String path = request.getPathInfo();
    String name = path == null ? "" : path.substring(1);
    byte[] bytes = files.get(name);
    if (bytes == null) {
      response.sendError(HttpServletResponse.SC_NOT_FOUND);
      return;
    }
    response.setContentType(TYPES.get(name));
    response.setHeader("Cache-Control", "private, max-age=86400");
    response.setHeader("X-Content-Type-Options", "nosniff");
    response.setContentLength(bytes.length);
    response.getOutputStream().write(bytes);
  }
}
