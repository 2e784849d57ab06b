// The running count per key in Kafka Streams: each record with the number of records of its key until then, from a topic to a
// topic. Arguments: address, input, output, name, folder for state, guarantee, standbys. Prints its phases; ends with its input.
import java.time.Duration;
import java.util.Properties;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.state.Stores;

public class Count {
    public static void main(String[] given) throws Exception {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", given[0]);
        settings.put("application.id", given[3]);
        settings.put("state.dir", given[4]);
        settings.put("processing.guarantee", given[5]);
        settings.put("num.standby.replicas", given[6]);
        settings.put("num.stream.threads", "1");
        settings.put("default.key.serde", Serdes.StringSerde.class.getName());
        settings.put("default.value.serde", Serdes.StringSerde.class.getName());
        settings.put("statestore.cache.max.bytes", "0"); // each record gives one
        settings.put("commit.interval.ms", "100");
        settings.put("auto.offset.reset", "earliest");
        settings.put("session.timeout.ms", "6000"); // as low as brokers allow by default
        settings.put("heartbeat.interval.ms", "1000");
        settings.put("producer.linger.ms", "0");

        StreamsBuilder flow = new StreamsBuilder();
        flow.stream(given[1], Consumed.with(Serdes.String(), Serdes.String()))
            .groupByKey()
            .aggregate(
                () -> "0,0",
                (key, due, before) -> due + "," + (Long.parseLong(before.substring(before.indexOf(',') + 1)) + 1),
                Materialized.<String, String>as(Stores.inMemoryKeyValueStore("counts"))
                    .withKeySerde(Serdes.String()).withValueSerde(Serdes.String()))
            .toStream()
            .to(given[2]);

        KafkaStreams streams = new KafkaStreams(flow.build(), settings);
        streams.setStateListener((now, before) -> System.out.println(now));
        streams.start();
        while (System.in.read() >= 0) { }
        streams.close(Duration.ofSeconds(5));
    }
}
