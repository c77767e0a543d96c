import java.io.PrintStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

/** Posts two bodies with the client's default settings: the first twice, on one connection; then the streamed one. */
public class JdkClient {
    public static void main(String[] arguments) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        PrintStream out = new PrintStream(System.out, true, "UTF-8");
        for (String body : new String[] {arguments[1], arguments[1], arguments[2]}) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(arguments[0]))
                .header("content-type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(body))
                .build();
            HttpResponse<String> response = client.send(request, HttpResponse.BodyHandlers.ofString());
            out.print(response.statusCode() + " " + response.version() + "\n" + response.body() + "\n----\n");
        }
    }
}
