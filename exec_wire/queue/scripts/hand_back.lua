-- Hands entries back as if they had not been delivered, and wakes the workers that wait for jobs.
-- KEYS: streams.
-- ARGV: group, consumer, idle time to set (ms), channel; then for each entry: stream number, entry id, deliveries before this one,
-- new consumer.
-- Returns the positions of the entries that the consumer held, from 0.
local given = {}
for at = 5, #ARGV, 4 do
  local stream, id = KEYS[tonumber(ARGV[at])], ARGV[at + 1]
  if #redis.call('XPENDING', stream, ARGV[1], id, id, 1, ARGV[2]) > 0 then
    redis.call('XCLAIM', stream, ARGV[1], ARGV[at + 3], 0, id, 'IDLE', ARGV[3], 'RETRYCOUNT', ARGV[at + 2], 'JUSTID')
    given[#given + 1] = (at - 5) / 4
  end
end
if #given > 0 then redis.call('PUBLISH', ARGV[4], '') end
return given
