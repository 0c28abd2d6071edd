-- Counts the start of held jobs that the consumer still holds.
-- KEYS: streams.
-- ARGV: group, consumer; then for each entry: stream number, entry id, deliveries with this start.
for at = 3, #ARGV, 3 do
  local stream, id = KEYS[tonumber(ARGV[at])], ARGV[at + 1]
  if #redis.call('XPENDING', stream, ARGV[1], id, id, 1, ARGV[2]) > 0 then
    redis.call('XCLAIM', stream, ARGV[1], ARGV[2], 0, id, 'RETRYCOUNT', ARGV[at + 2], 'JUSTID')
  end
end
