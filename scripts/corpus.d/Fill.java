import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.OutputStream;
import java.io.UncheckedIOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.OffsetDateTime;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Base64;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.UUID;
import java.util.concurrent.ConcurrentHashMap;
import java.util.zip.GZIPOutputStream;

/**
 * A Java service with its data in memory: loads the records, indexes them, says ready, waits for the end of stdin.
 *
 * <p>java Fill.java RECORDS
 */
public class Fill {
    record Line(String sku, String title, int quantity, double price) {}

    record Order(long id, UUID customer, OffsetDateTime created, double total, List<Line> lines) {}

    record LogLine(OffsetDateTime time, String level, String service, String trace, String message) {}

    private final Map<UUID, Map<String, Object>> users = new ConcurrentHashMap<>();
    private final Map<String, UUID> byEmail = new HashMap<>();
    private final TreeMap<Long, Order> orders = new TreeMap<>();
    private final List<LogLine> log = new ArrayList<>();
    private final Map<String, double[]> series = new HashMap<>();
    private final Map<String, Integer> words = new HashMap<>();
    private final List<Map<String, Object>> articles = new ArrayList<>();
    private final List<byte[]> messages = new ArrayList<>();
    private final Map<Object, float[]> vectors = new HashMap<>();
    private final StringBuilder recent = new StringBuilder();
    private final Map<String, byte[]> lists = new LinkedHashMap<>() {
        @Override
        protected boolean removeEldestEntry(Map.Entry<String, byte[]> eldest) {
            return size() > 500;
        }
    };

    public static void main(String[] arguments) throws IOException {
        Fill fill = new Fill();
        try (var lines = Files.lines(Path.of(arguments[0]))) {
            lines.forEach(fill::load);
        }
        System.out.println("ready " + ProcessHandle.current().pid());
        System.out.flush();
        while (System.in.read() >= 0) {}
        System.exit(fill.users.isEmpty() ? 1 : 0);
    }

    private void load(String text) {
        Map<String, Object> record = new Json(text).object();
        switch ((String) record.get("type")) {
            case "user" -> user(record, text);
            case "order" -> order(record, text);
            case "log" -> log.add(new LogLine(OffsetDateTime.parse(text(record, "time")), text(record, "level"),
                    text(record, "service").intern(), text(record, "trace"), text(record, "message")));
            case "measurement" -> measurement(record);
            case "article" -> article(record);
            default -> throw new IllegalArgumentException(text);
        }
    }

    private void user(Map<String, Object> record, String text) {
        UUID uuid = UUID.fromString(text(record, "uuid"));
        vectors.put(uuid, vector((String) record.remove("taste")));
        users.put(uuid, record);
        byEmail.put(text(record, "email"), uuid);
        messages.add(message((Long) record.get("id"), uuid, text(record, "email")));
        list("/users?until=" + uuid, text);
    }

    private void order(Map<String, Object> record, String text) {
        List<Line> lines = new ArrayList<>();
        for (Object item : (List<?>) record.get("items")) {
            @SuppressWarnings("unchecked")
            Map<String, Object> line = (Map<String, Object>) item;
            lines.add(new Line(text(line, "sku"), text(line, "title"), ((Long) line.get("quantity")).intValue(),
                    ((Number) line.get("price")).doubleValue()));
        }
        Order order = new Order((Long) record.get("id"), UUID.fromString(text(record, "customer")),
                OffsetDateTime.parse(text(record, "created")), ((Number) record.get("total")).doubleValue(), lines);
        orders.put(order.id(), order);
        messages.add(message(order.id(), order.customer(), text(record, "status")));
        list("/orders?until=" + order.id(), text);
    }

    private void measurement(Map<String, Object> record) {
        List<?> values = (List<?>) record.get("values");
        double[] known = series.getOrDefault(text(record, "sensor"), new double[0]);
        double[] longer = Arrays.copyOf(known, known.length + values.size());
        for (int i = 0; i < values.size(); i++) {
            longer[known.length + i] = ((Number) values.get(i)).doubleValue();
        }
        series.put(text(record, "sensor"), longer);
    }

    private void article(Map<String, Object> record) {
        vectors.put(record.get("id"), vector((String) record.remove("embedding")));
        articles.add(record);
        for (String word : text(record, "body").split("\\W+")) {
            words.merge(word, 1, Integer::sum);
        }
    }

    /** A cache of packed lists that forgets the oldest. */
    private void list(String path, String text) {
        recent.append(text).append('\n');
        if (recent.length() < 25_000) {
            return;
        }
        ByteArrayOutputStream packed = new ByteArrayOutputStream();
        try (OutputStream out = new GZIPOutputStream(packed)) {
            out.write(recent.toString().getBytes(StandardCharsets.UTF_8));
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
        lists.put(path, packed.toByteArray());
        recent.setLength(0);
    }

    private static float[] vector(String packed) {
        ByteBuffer bytes = ByteBuffer.wrap(Base64.getDecoder().decode(packed)).order(ByteOrder.LITTLE_ENDIAN);
        float[] vector = new float[bytes.remaining() / Float.BYTES];
        bytes.asFloatBuffer().get(vector);
        return vector;
    }

    private static String text(Map<String, Object> record, String name) {
        return (String) record.get(name);
    }

    /** The record as a binary message. */
    private static byte[] message(long id, UUID uuid, String text) {
        byte[] bytes = text.getBytes(StandardCharsets.UTF_8);
        return ByteBuffer.allocate(28 + bytes.length).putInt(bytes.length).putLong(id)
                .putLong(uuid.getMostSignificantBits()).putLong(uuid.getLeastSignificantBits()).put(bytes).array();
    }

    /** As much of JSON as the records have. */
    private static class Json {
        private final String text;
        private int at = 0;

        Json(String text) {
            this.text = text;
        }

        Map<String, Object> object() {
            Map<String, Object> object = new LinkedHashMap<>();
            at++;
            while (!end('}')) {
                String name = string().intern();
                skip();
                at++;
                object.put(name, value());
            }
            return object;
        }

        private List<Object> array() {
            List<Object> array = new ArrayList<>();
            at++;
            while (!end(']')) {
                array.add(value());
            }
            return array;
        }

        private Object value() {
            skip();
            return switch (text.charAt(at)) {
                case '{' -> object();
                case '[' -> array();
                case '"' -> string();
                case 't' -> word("true", Boolean.TRUE);
                case 'f' -> word("false", Boolean.FALSE);
                case 'n' -> word("null", null);
                default -> number();
            };
        }

        private Object word(String word, Object value) {
            at += word.length();
            return value;
        }

        private Object number() {
            int start = at;
            while ("+-.eE0123456789".indexOf(text.charAt(at)) >= 0) {
                at++;
            }
            String digits = text.substring(start, at);
            if (digits.matches("-?[0-9]+")) {
                return Long.valueOf(digits);
            }
            return Double.valueOf(digits);
        }

        private String string() {
            StringBuilder out = new StringBuilder();
            for (at++; text.charAt(at) != '"'; at++) {
                if (text.charAt(at) != '\\') {
                    out.append(text.charAt(at));
                } else if (text.charAt(++at) == 'u') {
                    out.append((char) Integer.parseInt(text.substring(at + 1, at + 5), 16));
                    at += 4;
                } else {
                    out.append(text.charAt(at));
                }
            }
            at++;
            return out.toString();
        }

        /** Passes blanks and a comma; then, if the closing character is next, that too. */
        private boolean end(char closing) {
            skip();
            boolean end = text.charAt(at) == closing;
            if (end) {
                at++;
            }
            return end;
        }

        private void skip() {
            while (text.charAt(at) == ' ' || text.charAt(at) == ',') {
                at++;
            }
        }
    }
}
