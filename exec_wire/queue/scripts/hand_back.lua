-- Hands entries back as if they had not been delivered.
-- KEYS: streams.
-- ARGV: group, consumer, idle time to set (ms); then for each entry: stream number, entry id, deliveries before this one, new consumer.
for at = 4, #ARGV, 4 do
  local stream, id = KEYS[tonumber(ARGV[at])], ARGV[at + 1]
  if #redis.call('XPENDING', stream, ARGV[1], id, id, 1, ARGV[2]) > 0 then
    redis.call('XCLAIM', stream, ARGV[1], ARGV[at + 3], 0, id, 'IDLE', ARGV[3], 'RETRYCOUNT', ARGV[at + 2], 'JUSTID')
  end
end
